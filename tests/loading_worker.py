"""One of several processes that load a sharded transformer: torch.distributed.run this FOLDER RESULTS.

Each writes the growth of its anonymous memory and what it holds then, in bytes, to RESULTS/<rank>.json.
"""

import json
import re
import sys
from pathlib import Path

from qwenimage_tpu import environment


def anonymous_bytes() -> int:
    status = Path("/proc/self/status").read_text()
    return int(re.findall(r"RssAnon:\s+(\d+) kB", status)[0]) * 1024


def main(folder: Path, results: Path) -> None:
    import torch
    import torch.distributed as dist
    from torch.distributed.tensor import DTensor

    from qwenimage_tpu.parallel.processes import MODEL, start_mesh
    from qwenimage_tpu.parallel.transformer import load_transformer

    mesh = start_mesh(1, environment.process_count(), "cpu")
    before = anonymous_bytes()
    model = load_transformer(folder, mesh[MODEL], torch.bfloat16)
    growth = anonymous_bytes() - before
    held = [part.to_local() if isinstance(part, DTensor) else part for part in model.parameters()]
    found = {
        "growth": growth,
        "shards": sum(part.nbytes for part in held),
        "largest": max(part.numel() * part.element_size() for part in model.parameters()),
    }
    (results / f"{dist.get_rank()}.json").write_text(json.dumps(found))
    dist.destroy_process_group()


if __name__ == "__main__":
    environment.configure()
    main(Path(sys.argv[1]), Path(sys.argv[2]))
