"""Programs that run as two processes, connected by gloo."""

import os
import subprocess
import sys
from pathlib import Path

# The beginning and the end of each process's program. A process that ended by itself could be aborted: a thread of
# gloo that is the last to hold a tensor made in Python wants the interpreter, which may be gone by then.
BEGIN = """
import os
import sys
import torch
import torch.distributed as dist

rank, folder = int(sys.argv[1]), sys.argv[2]
torch.set_num_threads(1)
dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
"""
END = """
dist.barrier()
dist.destroy_process_group()
sys.stdout.flush()
sys.stderr.flush()
os._exit(0)
"""


def run_two(program: str, folder: Path, seconds: float = 120) -> list[str]:
    """Run a program twice, with its ``rank`` and a ``folder`` that both share. Return what each prints."""
    paths = [str(Path(__file__).parent), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(paths)}
    command = [sys.executable, "-c", BEGIN + program + END]
    processes = [
        subprocess.Popen(
            [*command, str(rank), str(folder)],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        both = [process.communicate(timeout=seconds) for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert [process.returncode for process in processes] == [0, 0], "\n".join(errors for _, errors in both)
    return [output for output, _ in both]
