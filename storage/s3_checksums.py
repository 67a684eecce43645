"""Which checksums go with the parts of an upload."""

from copy import copy
from typing import Any

from botocore import UNSIGNED  # type: ignore[import-untyped]

__all__ = ["hash_parts_once"]


def hash_parts_once(client: Any) -> None:
    """Leave the check of parts sent over plain http to the SHA-256 that signs them.

    botocore would add a CRC32: a quarter of the client's work. An object stored by one request keeps it, because there
    are servers that compare nothing else, and show as the object what arrived before a connection broke; such a part
    is never made part of an object, which is made of the tags that the server gave for whole ones. Over https, where
    bodies are not signed, it is the only check. ``s3_additional_kwargs={"ChecksumAlgorithm": ...}`` still asks for one.

    Args:
        client: An S3 client of aiobotocore. Nothing happens the second time.
    """
    config = client.meta.config
    signs = config.signature_version is not UNSIGNED and (config.s3 or {}).get(
        "payload_signing_enabled", True
    )
    if not (signs and client.meta.endpoint_url.startswith("http:")):
        return
    once = copy(config)
    once.request_checksum_calculation = "when_required"

    def choose(context: dict[str, Any], **_: Any) -> None:
        context["client_config"] = once

    client.meta.events.register("provide-client-params.s3.UploadPart", choose, unique_id=__name__)
