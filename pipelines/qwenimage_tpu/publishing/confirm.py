"""Load a build as a user would, in a process and a cache of its own."""

import json
import os
import subprocess
import sys
import tempfile

from .repository import PublishError

# Of what the user's shell says, this would lead elsewhere than to the Hub.
LEFT_OUT = ("LOCAL_KERNELS", "HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE")


def try_version(repo: str, version: int, token: str | None, build_ids: dict[str, str]) -> str:
    """Load a version from a folder or the Hub with verified digests, run a kernel, and say what was found.

    Raises:
        PublishError: it does not load, its kernel is wrong, or it is not one of `build_ids`.
    """
    with tempfile.TemporaryDirectory(prefix="qwenimage-tpu-") as folder:
        environ = {name: value for name, value in os.environ.items() if name not in LEFT_OUT}
        environ |= {"KERNELS_CACHE": folder} | ({"HF_TOKEN": token} if token else {})
        done = subprocess.run(
            [sys.executable, "-m", "qwenimage_tpu.publishing.confirm", repo, str(version)],
            env=environ,
            cwd=folder,
            capture_output=True,
            text=True,
            check=False,
        )
    if done.returncode:
        raise PublishError(done.stderr.strip())
    found = json.loads(done.stdout.splitlines()[-1])
    if found["build_id"] != build_ids.get(found["variant"]):
        raise PublishError(
            f"{repo} gives the build {found['build_id']} for {found['variant']}, but expected was"
            f" {build_ids.get(found['variant'])}"
        )
    return f"{found['variant']}, {found['build_id']}, {found['kernel']}"


def main(repo: str, version: int) -> None:
    from qwenimage_tpu import environment

    environment.configure()
    from qwenimage_tpu.doctor_kernels import check_smoke_run
    from qwenimage_tpu.kernel_loader import KernelLoadError, load_kernels

    try:
        loaded = load_kernels(repo, version=version, trust_remote_code=True)
    except KernelLoadError as error:
        sys.exit(str(error))
    check = check_smoke_run(loaded)
    if check.status != "ok":
        sys.exit(f"{check.name}: {check.found}")
    print(json.dumps({"build_id": loaded.build_id, "variant": loaded.variant, "kernel": check.found}))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
