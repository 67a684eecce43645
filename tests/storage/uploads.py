"""Multipart uploads that were begun and neither completed nor aborted, as the server knows them."""

import s3fs

from storage import Store
from tests.storage.seaweed import S3Server

__all__ = ["abort_uploads", "unfinished_uploads"]


def unfinished_uploads(server: S3Server, store: Store) -> dict[str, str]:
    """Keys by upload id, of those below a store."""
    filesystem = s3fs.S3FileSystem(**server.storage_options)
    answer = filesystem.call_s3(
        "list_multipart_uploads",
        Bucket=server.bucket,
        Prefix=store.url.removeprefix(f"s3://{server.bucket}/"),
    )
    return {one["UploadId"]: one["Key"] for one in answer.get("Uploads") or []}


def abort_uploads(server: S3Server, store: Store) -> None:
    """Do what a rule of the bucket would do some day, so that other tests find the server clean."""
    filesystem = s3fs.S3FileSystem(**server.storage_options)
    for upload_id, key in unfinished_uploads(server, store).items():
        filesystem.call_s3("abort_multipart_upload", Bucket=server.bucket, Key=key, UploadId=upload_id)
