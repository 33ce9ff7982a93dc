"""The version of this package."""

from importlib.metadata import PackageNotFoundError, version

try:
    __version__ = version("opendsec")
except PackageNotFoundError:  # run from a source tree
    __version__ = "0.0.0"

USER_AGENT = f"opendsec-python/{__version__}"
