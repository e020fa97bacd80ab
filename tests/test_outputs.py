"""What outputs look like, and that they and errors survive a trip to another process."""

import pickle

from jaxserve.exceptions import ParameterError
from jaxserve.outputs import CompletionOutput, RequestOutput


def output(**fields) -> RequestOutput:
    sample = CompletionOutput(index=0, text="<b>42</b>\n", token_ids=[4, 2], finish_reason="stop", stop_reason="\n<i>")
    given = {"prompt": "6 < 7 & 7 * 6 =", "prompt_token_ids": [1, 2, 3], "outputs": [sample], "finished": True}
    return RequestOutput(request_id="a", **given | fields)


def test_a_notebook_shows_prompt_and_samples_and_runs_none_of_it():
    shown = output()._repr_html_()
    assert "6 &lt; 7 &amp; 7 * 6 =" in shown
    assert "&lt;b&gt;42&lt;/b&gt;" in shown
    assert "<i>" not in shown
    assert "2 tokens" in shown
    assert "stop at" in shown


def test_a_prompt_of_tokens_is_counted_and_a_long_one_shows_its_end():
    assert "[3 tokens]" in output(prompt=None)._repr_html_()
    shown = output(prompt="begin" + "x" * 10_000 + "end")._repr_html_()
    assert "begin" not in shown
    assert "xend" in shown
    assert len(shown) < 4000


def test_outputs_and_errors_can_be_pickled():
    assert pickle.loads(pickle.dumps(output())) == output()
    error = pickle.loads(pickle.dumps(ParameterError("top_p", 7.0, "in (0, 1]")))
    assert (error.parameter, error.value, str(error)) == ("top_p", 7.0, "top_p must be in (0, 1], got 7.0")
