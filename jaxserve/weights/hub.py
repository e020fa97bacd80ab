"""Checkpoints from the Hugging Face hub (or another server that HF_ENDPOINT names)."""

from pathlib import Path

from jaxserve.exceptions import WeightsError

_CONFIGS = ["*.json", "chat_template.jinja"]
_WEIGHTS = ["*.safetensors"]
_NOT_OURS = ["*/*", "consolidated*"]  # the same weights again, in the formats of other tools


def download(model_id: str, *, revision: str | None, weights: bool = True) -> Path:
    """The folder of the cache that holds the model's files; downloads those that are absent.

    Args:
      weights: False fetches configuration and tokenizer only.

    Raises:
      WeightsError: no such model, no access, or no connection and not in the cache.
    """
    # Imported here, as the import takes a good part of a second and most loads are local.
    from huggingface_hub import errors, snapshot_download

    try:
        patterns = _CONFIGS + (_WEIGHTS if weights else [])
        return Path(snapshot_download(model_id, revision=revision, allow_patterns=patterns, ignore_patterns=_NOT_OURS))
    except errors.GatedRepoError as error:
        raise WeightsError(f"{model_id} asks for its licence to be accepted; do so, then set HF_TOKEN") from error
    except errors.RepositoryNotFoundError as error:
        raise WeightsError(f"{model_id!r} is no file or folder here, and the hub has no such model") from error
    except errors.RevisionNotFoundError as error:
        raise WeightsError(f"{model_id} has no revision {revision!r}") from error
    except errors.HFValidationError as error:
        raise WeightsError(f"{model_id!r} is no file or folder here, and no id that the hub could have") from error
    except (errors.LocalEntryNotFoundError, errors.HfHubHTTPError, OSError) as error:
        reason = str(error).partition("\n")[0]
        raise WeightsError(f"{model_id} could not be downloaded ({reason}) and is not in the cache") from error
