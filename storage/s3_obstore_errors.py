"""Reading the errors of obstore.

Its exceptions carry text only: a summary with the HTTP status and the server's XML in it, then a dump of its internals
with what the network did.
"""

import re
from typing import Final

from obstore.exceptions import BaseError

from storage.errors import StorageError, Transient
from storage.s3_errors import classify_s3, from_s3_code

__all__ = ["classify_obstore", "obstore_status"]

_STATUS: Final = re.compile(r"status code: (\d{3}) ?([^:<\n]*)")
_CODE: Final = re.compile(r"<Code>([^<]+)</Code>")
_MESSAGE: Final = re.compile(r"<Message>([^<]+)</Message>")
_NETWORK: Final = re.compile(r"HTTP error: (.*)")
_DETAILS: Final = (re.compile(r"HttpError \{\s*kind: (\w+)"), re.compile(r'message: "([^"]+)"'))
_DUMP: Final = "\n\nDebug source:"


def classify_obstore(error: BaseException, path: str) -> StorageError | None:
    """As ``storage.s3_errors.classify_s3``, which reads all that did not come from obstore.

    Args:
        error: What a call of obstore, or through s3fs, raised.
        path: URL of the object the operation was about.
    """
    if not isinstance(error, BaseError | FileNotFoundError):
        return classify_s3(error, path)
    summary, _, dump = str(error).partition(_DUMP)
    if answer := _STATUS.search(summary):
        code, message = _CODE.search(summary), _MESSAGE.search(summary)
        words = message[1] if message else answer[2].strip()
        return from_s3_code(int(answer[1]), code[1] if code else "", words, path)
    if network := _NETWORK.search(summary):
        details = [found[1] for found in (pattern.search(dump) for pattern in _DETAILS) if found]
        return Transient(path, f"{network[1]} ({', '.join(details).lower()})" if details else network[1])
    return classify_s3(error, path) or StorageError(path, " ".join(summary.split()))


def obstore_status(error: BaseException) -> int | None:
    """The HTTP status of the answer that an error of obstore came from, if it came from one."""
    found = _STATUS.search(str(error))
    return int(found[1]) if found else None
