"""Addresses of storage that hold a secret, in every way there is."""

from __future__ import annotations

SECRET = "hunter2"

WITH_A_SECRET = [
    f"s3://me:{SECRET}@bucket/runs",
    f"s3://:{SECRET}@bucket/runs",
    f"sftp://me:{SECRET}@host:22/runs",
    f"https://me:{SECRET}@host/runs?region=x",
    f"s3://me:a@b:{SECRET}@bucket",
    f"abfs://container@account/runs?client_secret={SECRET}",
    f"abfs://container@account/runs?tenant_id=x&client_secret={SECRET}",
    f"abfs://container@account/runs?sv=2024&sig={SECRET}",
    f"https://bucket.host/runs?X-Amz-Signature={SECRET}&X-Amz-Date=x",
    f"webdav://host/runs?password={SECRET}",
    f"gs://bucket/runs?access_token={SECRET}",
    f"s3://bucket/runs?secret_key={SECRET}",
]
