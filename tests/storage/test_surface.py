"""The public names of the package, and that importing them is cheap."""

import subprocess
import sys

import storage


def test_the_public_surface_is_sorted_and_complete() -> None:
    assert storage.__all__ == sorted(storage.__all__)
    public = {
        name for name, value in vars(storage).items() if not name.startswith("_") and name != "annotations"
    }
    modules = {name for name in public if type(getattr(storage, name)).__name__ == "module"}
    assert set(storage.__all__) == public - modules


def test_importing_storage_loads_no_driver_and_no_torch() -> None:
    heavy = ("torch", "ray", "s3fs", "fsspec", "botocore", "pyarrow", "numpy", "asyncio")
    script = f"import sys, storage; print([name for name in {heavy!r} if name in sys.modules])"
    found = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=60
    )
    assert found.stdout.strip() == "[]"
