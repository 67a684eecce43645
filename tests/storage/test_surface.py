"""The public names of the package, and that importing them is cheap."""

import subprocess
import sys

import pytest

import storage


def test_the_public_surface_is_sorted_and_complete() -> None:
    assert storage.__all__ == sorted(storage.__all__)
    assert set(storage.__all__) <= set(dir(storage))
    for name in storage.__all__:
        assert getattr(storage, name).__name__ == name
    helpers = {"TYPE_CHECKING", "import_module"}
    public = {name for name in vars(storage) if not name.startswith("_")} - helpers
    modules = {name for name in public if type(getattr(storage, name)).__name__ == "module"}
    assert public - modules <= set(storage.__all__)
    with pytest.raises(AttributeError, match="module 'storage' has no attribute 'Tears'"):
        storage.Tears  # noqa: B018 - what a user who mistypes does


def test_importing_storage_loads_no_driver_and_no_torch() -> None:
    heavy = ("torch", "ray", "s3fs", "fsspec", "botocore", "pyarrow", "numpy", "asyncio", "prometheus_client")
    script = f"import sys, storage; print([name for name in {heavy!r} if name in sys.modules])"
    found = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=60
    )
    assert found.stdout.strip() == "[]"
