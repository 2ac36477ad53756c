"""`make gpu-check`: the checks that need a GPU, in at most four minutes on a machine with one.

Builds the module, runs many ranks on one GPU by one cooperative launch (values, bits, timeouts,
compute-sanitizer, bandwidth against a device copy), then two processes on one GPU: joined by CUDA
IPC, and by XLA's cliques where NCCL allows several ranks on a GPU. With several GPUs it adds
lax.psum, lax.psum without XLA's own kernels, and NCCL. Prints one table and writes JSON.

Without a GPU it says what is missing and ends with status 3; --dry-run does all that needs none:
it compiles everything, and runs the JAX programs on CPUs."""

from __future__ import annotations

import argparse
import json
import os
import shutil
import socket
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
HERE = Path(__file__).resolve().parent
NO_GPU = 3
# XLA's flag for its own all-reduce kernels; empty, lax.psum is NCCL alone.
NO_KERNELS = "--xla_gpu_experimental_use_collective_kernels="


class Check:
    """The parts, their deadline, and what they have found."""

    def __init__(self, options: argparse.Namespace):
        self.dry_run = options.dry_run
        self.build = Path(options.build).resolve()
        self.deadline = time.monotonic() + options.limit_s
        self.rows: list[dict] = []
        self.environment = {
            **os.environ,
            "PYTHONPATH": str(ROOT),
            "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
            "JAXRING_TIMEOUT_S": "30",
        }
        if self.dry_run:
            self.environment["JAX_PLATFORMS"] = "cpu"

    def say(self, part: str, case: str, ok: bool | None, detail: str = "") -> None:
        """ok=None: left out, for the reason in `detail`."""
        self.rows.append({"part": part, "case": case, "ok": ok, "detail": detail})

    def run(self, part: str, case: str, command: list[str], most_s: float, **more: str) -> bool:
        """Runs a command, whose lines of JSON become rows; its failure is a row too."""
        left_s = min(most_s, self.deadline - time.monotonic())
        if left_s <= 1:
            self.say(part, case, None, "no time left")
            return False
        try:
            done = subprocess.run(
                command,
                capture_output=True,
                text=True,
                timeout=left_s,
                env={**self.environment, **more},
            )
        except subprocess.TimeoutExpired:
            self.say(part, case, False, f"not done after {left_s:.0f} s")
            return False
        except OSError as e:
            self.say(part, case, False, str(e))
            return False
        self._read(done.stdout)
        if done.returncode != 0:
            tail = " ".join((done.stderr or done.stdout).strip().splitlines()[-3:])
            self.say(part, case, False, tail[-400:] or f"status {done.returncode}")
        return done.returncode == 0

    def _read(self, output: str) -> None:
        for line in output.splitlines():
            if line.startswith('{"part"'):
                self.rows.append(json.loads(line))

    def together(self, part: str, size: int, most_s: float, **more: str) -> bool:
        """`size` worker processes of one part; True if all rows are good."""
        before = len(self.rows)
        with socket.create_server(("127.0.0.1", 0)) as free:
            coordinator = f"127.0.0.1:{free.getsockname()[1]}"
        worker = [sys.executable, str(HERE / "gpu_check_worker.py"), part]
        children = [
            subprocess.Popen(
                [*worker, str(rank), str(size), coordinator],
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                env={**self.environment, "JAXRING_SECRET": "gpu-check", **more},
            )
            for rank in range(size)
        ]
        end = min(self.deadline, time.monotonic() + most_s)
        for rank, child in enumerate(children):
            try:
                out, err = child.communicate(timeout=max(1.0, end - time.monotonic()))
            except subprocess.TimeoutExpired:
                child.kill()
                out, err = child.communicate()
                self.say(part, f"rank {rank}", False, f"not done after {most_s:.0f} s")
            self._read(out)
            if child.returncode != 0 and '"ok": false' not in out:
                tail = " ".join(err.strip().splitlines()[-2:])
                self.say(part, f"rank {rank}", False, tail[-400:])
        found = self.rows[before:]
        return bool(found) and all(row["ok"] for row in found)

    # -- The parts ---------------------------------------------------------------------------------

    def compile(self, architectures: str) -> bool:
        include = os.environ.get("JAXRING_FFI_INCLUDE_DIR", "")
        configure = [
            "cmake", "-S", str(ROOT), "-B", str(self.build), "-G", "Ninja",
            f"-DPython_EXECUTABLE={sys.executable}", "-DJAXRING_CUDA=ON",
            "-DJAXRING_DEV_INPLACE=ON", "-DJAXRING_GPU_CHECK=ON",
            f"-DJAXRING_CUDA_ARCHITECTURES={architectures}",
            f"-DJAXRING_FFI_INCLUDE_DIR={include}",
            # Built for the jaxlib of this machine only, whatever its version.
            "-DJAXRING_FFI_NEWEST_MINOR=99",
        ]  # fmt: skip
        return self.run("build", "configure", configure, 60) and self.run(
            "build", "compile", ["cmake", "--build", str(self.build)], 400 if self.dry_run else 150
        )

    def ranks_on_one_gpu(self) -> None:
        program = str(self.build / "gpu_check_ranks")
        if self.dry_run:
            self.run("values", "dry run", [program, "--dry-run"], 30)
            return
        self.run("values", "many ranks", [program], 60)
        sanitizer = shutil.which("compute-sanitizer") or "/usr/local/cuda/bin/compute-sanitizer"
        if not os.path.exists(sanitizer):
            self.say("sanitizer", "memcheck", None, "compute-sanitizer is not installed")
            return
        for tool in ("memcheck", "racecheck"):
            command = [sanitizer, "--tool", tool, "--error-exitcode", "9", program, "--quick"]
            if self.run("sanitizer", tool, command, 40):
                self.say("sanitizer", tool, True)

    def processes_on_one_gpu(self) -> None:
        self.together("processes", 2, 60)
        if self.dry_run:
            self.together("cliques", 2, 60)
            return
        before = len(self.rows)
        if not self.together("cliques", 2, 45, NCCL_MULTI_RANK_GPU_ENABLE="1"):
            for row in self.rows[before:]:
                # Needs NCCL 2.30; that it is refused is no fault of ours.
                row.update(ok=None, detail=f"not possible here: {row['detail']}"[:300])

    def several_gpus(self, count: int) -> None:
        worker = [sys.executable, str(HERE / "gpu_check_worker.py"), "devices"]
        if self.dry_run:
            flags = "--xla_force_host_platform_device_count=2"
            self.run("devices", "dry run", worker, 60, XLA_FLAGS=flags, GPU_CHECK_MOST="65536")
        elif count < 2:
            self.say("devices", "several GPUs", None, "there is one GPU")
        else:
            self.run("devices", "jaxring and lax.psum", worker, 60)
            self.run(
                "devices",
                "psum by NCCL",
                worker,
                60,
                XLA_FLAGS=NO_KERNELS,
                GPU_CHECK_LABEL="psum without XLA's kernels (NCCL)",
            )

    def table(self) -> str:
        mark = {True: "ok", False: "FAILED", None: "left out"}
        lines, good = [], {}
        for row in self.rows:
            if row["ok"] is True and not row["detail"]:
                good[row["part"]] = good.get(row["part"], 0) + 1
                continue
            lines.append(f"{row['part']:<10} {mark[row['ok']]:<9} {row['case']}: {row['detail']}")
        lines += [f"{part:<10} ok        {count} cases" for part, count in good.items()]
        return "\n".join(lines)


def gpus() -> tuple[int, str, str]:
    """(number of GPUs, their architecture such as "90", why there are none)."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return 0, "", "nvidia-smi is not installed, so there is no NVIDIA driver"
    query = [tool, "--query-gpu=compute_cap", "--format=csv,noheader"]
    done = subprocess.run(query, capture_output=True, text=True)
    found = done.stdout.split()
    if done.returncode != 0 or not found:
        return 0, "", f"nvidia-smi finds no GPU: {done.stdout.strip() or done.stderr.strip()}"
    return len(found), found[0].replace(".", ""), ""


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--dry-run", action="store_true", help="what needs no GPU; runs on CPUs")
    parser.add_argument("--limit-s", type=float, default=240, help="seconds in all (default 240)")
    parser.add_argument("--build", default=str(ROOT / "build/gpu"), help="folder to build in")
    parser.add_argument("--skip-build", action="store_true", help="use what is built there")
    parser.add_argument("--architectures", default="", help='such as "90"; default: this GPU\'s')
    parser.add_argument("--json", default="gpu_check.json", help="file for the results")
    options = parser.parse_args()
    count, architecture, why_none = gpus()
    if count == 0 and not options.dry_run:
        print(f"gpu-check: no GPU: {why_none}; --dry-run does what needs none", file=sys.stderr)
        return NO_GPU
    check = Check(options)
    if options.skip_build or check.compile(options.architectures or architecture or "90"):
        check.ranks_on_one_gpu()
        check.processes_on_one_gpu()
        check.several_gpus(count)
    failed = sum(row["ok"] is False for row in check.rows)
    print(check.table())
    print(f"gpu-check: {len(check.rows)} rows, {failed} failed" + (" (dry run)" * check.dry_run))
    if options.dry_run and count == 0:
        print(f"gpu-check: left out, since {why_none}: kernels, CUDA IPC, NCCL, every figure")
    Path(options.json).write_text(json.dumps({"gpus": count, "rows": check.rows}, indent=1))
    return 1 if failed or not check.rows else 0


if __name__ == "__main__":
    sys.exit(main())
