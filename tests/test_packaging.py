"""The wheel holds the real files behind the symlinks, all of them, and works away from the checkout."""

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKED = (".py", ".typed", ".json", ".html")
LINKED = ("layers", "pallas_kernels", "sharding", "scheduler")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    """The wheel of a copy of the tracked files, so that nothing left in the checkout can help or hurt."""
    source, target = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("wheel")
    names = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True, text=True).stdout
    tar = subprocess.run(["tar", "-c", "--null", "-T", "-"], cwd=ROOT, input=names.encode(), stdout=-1, check=True)
    subprocess.run(["tar", "-x"], cwd=source, input=tar.stdout, check=True)
    build = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(target), str(source)]
    result = subprocess.run(build, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout + result.stderr
    (path,) = target.glob("*.whl")
    return path


def test_every_module_is_in_the_wheel_and_nothing_else(wheel):
    with zipfile.ZipFile(wheel) as archive:
        packed = {name for name in archive.namelist() if ".dist-info/" not in name}
        assert all(archive.getinfo(name).file_size or name.endswith("__init__.py") or name.endswith("py.typed")
                   for name in packed)  # fmt: skip
    tracked = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, check=True, text=True).stdout.split()
    expected = {name for name in tracked if name.startswith("jaxserve/") and name.endswith(PACKED)}
    for folder in LINKED:
        found = {f"jaxserve/{name}" for name in tracked if name.startswith(f"{folder}/") and name.endswith(PACKED)}
        assert found
        expected |= found
    assert packed == expected


def test_the_wheel_carries_its_licence_and_command(wheel):
    with zipfile.ZipFile(wheel) as archive:
        info = {name.split(".dist-info/")[1]: name for name in archive.namelist() if ".dist-info/" in name}
        assert "Apache License" in archive.read(info["licenses/LICENSE"]).decode()
        assert "jaxserve = jaxserve.cli:main" in archive.read(info["entry_points.txt"]).decode()


def test_the_wheel_imports_away_from_the_checkout(wheel, tmp_path):
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path)
    program = (
        f"import sys; sys.path.insert(0, {str(tmp_path)!r}); import jaxserve, jaxserve.layers, jaxserve.scheduler; "
        "print(jaxserve.__file__, jaxserve.layers.__file__, jaxserve.LLM.__name__)"
    )
    result = subprocess.run([sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True, check=True)
    module, layers, name = result.stdout.split()
    assert module == str(tmp_path / "jaxserve" / "__init__.py")
    assert layers == str(tmp_path / "jaxserve" / "layers" / "__init__.py")
    assert name == "LLM"
