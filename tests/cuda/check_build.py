"""Checks what nvcc made of the CUDA kernels; needs no GPU.

    python tests/cuda/check_build.py BUILD [--nvcc NVCC] [--cuobjdump CUOBJDUMP]

BUILD/cuda holds the objects and ptxas's reports (target jaxring_cuda). Checked are, for every GPU
compiled for: registers, and that nothing spills; in PTX: 16-byte loads, several in a row, and
stores in the loops that copy and reduce, the orderings of flags and packets, and nothing that would
read a stale cache or hide behind a fence; in SASS, where cuobjdump is found, the same instructions.
"""

import argparse
import re
import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
KERNELS = ("kernels_moves", "kernels_integers", "kernels_floats", "kernels_float8")
MULTIMEM = "kernels_multimem"  # of sm_90 and newer
TARGETS = ("sm_80", "sm_90", "sm_100", "sm_120")
MAX_REGISTERS = 255

# Function (part of its mangled name) -> what its PTX must hold, and how often at least.
PTX_LOOPS = {
    "run_foldIf": {"ld.global.v4.b32": 8, "st.global.v4.b32": 4},
    "run_foldINS_10SmallFloatItLi8E": {"ld.global.v4.b32": 8, "st.global.v4.b32": 4},
    "4cuda4move": {"ld.global.v4.b32": 4, "st.global.v4.b32": 4},
    "4cuda4fill": {"st.global.v4.b32": 1},
    "11run_packets": {
        "st.relaxed.sys.global.v2.b64": 2,
        "ld.relaxed.sys.global.v2.b64": 2,
    },
    "8one_shot": {"st.release.sys.global.u64": 1, "ld.acquire.sys.global.u64": 1},
    "8two_shot": {"st.release.sys.global.u64": 2, "ld.acquire.sys.global.u64": 2},
    "4step": {"st.release.sys.global.u64": 2, "ld.acquire.sys.global.u64": 2},
    "8MultimemI": {
        "st.release.sys.global.u64": 2,
        "ld.acquire.sys.global.u64": 2,
        "fence.proxy.alias;": 2,
    },
    "9sum_packsIf": {
        "multimem.ld_reduce.relaxed.sys.global.add.v4.f32": 5,
        "multimem.st.relaxed.sys.global.v4.f32": 5,
    },
    "9sum_packsINS_10SmallFloat": {
        "multimem.ld_reduce.relaxed.sys.global.add.acc::f32.v4.": 5,
        "multimem.st.relaxed.sys.global.v4.f32": 5,
    },
}
SASS_CODE = re.compile(r"^\s+/\*[0-9a-f]+\*/\s+(?:@!?U?P\w+ )?([A-Z][\w.]+)", re.M)
PTX_NEVER = r"\b(?:ld\.global\.nc|ld\.volatile|st\.volatile|membar|fence)[\w.]*"
PTX_NEEDED = {MULTIMEM: {"fence.proxy.alias"}}
# SASS -> why it must be there.
SASS = {
    "LDG.E.128": "16-byte loads",
    "STG.E.128": "16-byte stores",
    "LDG.E.64.STRONG.SYS": "acquire loads of flags",
    "CCTL.IVALL": "acquire: what the first-level cache holds is dropped",
    "MEMBAR": "release: what was written before is out",
    "STG.E.64.STRONG.SYS": "release stores of flags",
}
SASS_PACKETS = {
    "LDG.E.128.STRONG.SYS": "two packets in one load",
    "STG.E.128.STRONG.SYS": "two packets in one store",
}
SASS_MULTIMEM = {
    "LDGMC.E.ADD.F32x4": "16-byte sums of float32 by the switch",
    "LDGMC.E.": "sums by the switch",
    "STG.E.128.STRONG.SYS": "16-byte stores to all ranks",
}


class Report:
    def __init__(self) -> None:
        self.failures: list[str] = []

    def expect(self, condition: bool, failure: str) -> None:
        if not condition:
            self.failures.append(failure)


def check_registers(build: Path, report: Report) -> None:
    print(f"{'kernel':18} {'target':8} {'registers':>9} {'stack':>6} {'spills':>6}   (bytes)")
    for kernel in (*KERNELS, MULTIMEM):
        text = (build / "cuda" / f"{kernel}.o.log").read_text()
        entries = re.split(r"(?=ptxas info\s+: Compiling entry function)", text)[1:]
        seen = {}
        for entry in entries:
            target = re.search(r"for '(sm_\d+)'", entry)
            registers = re.search(r"Used (\d+) registers", entry)
            stack = re.search(r"(\d+) bytes cumulative stack size", entry)
            if target is None or registers is None:
                continue
            spilled = sum(map(int, re.findall(r"(\d+) bytes spill (?:stores|loads)", entry)))
            seen[target[1]] = int(registers[1])
            stack_bytes = stack[1] if stack else "0"
            print(f"{kernel:18} {target[1]:8} {registers[1]:>9} {stack_bytes:>6} {spilled:>6}")
            report.expect(spilled == 0, f"{kernel} spills {spilled} bytes on {target[1]}")
            report.expect(int(registers[1]) <= MAX_REGISTERS, f"{kernel}: {registers[1]} registers")
        missing = set(TARGETS) - set(seen)
        report.expect(not missing, f"{kernel} was not compiled for {', '.join(sorted(missing))}")


def functions_of(ptx: str) -> dict[str, str]:
    """Definitions by mangled name."""
    pattern = r"^(?:\.visible |\.weak )?\.(?:func|entry)[^;{]*?(_Z\w+)\([^;{]*\{(.*?)^\}"
    return dict(re.findall(pattern, ptx, re.M | re.S))


def check_ptx(nvcc: str, build: Path, report: Report) -> None:
    found = Counter()
    for kernel in ("kernels_moves", "kernels_floats", MULTIMEM):
        source = ROOT / "xla_ffi" / "cuda" / f"{kernel}.cu"
        output = build / "cuda" / f"{kernel}.ptx"
        command = [nvcc, "-std=c++17", "-O3", "-ptx", "-arch=compute_90", f"-I{ROOT}", str(source)]
        subprocess.run([*command, "-o", str(output)], check=True)
        ptx = output.read_text()
        for never in set(re.findall(PTX_NEVER, ptx)) - PTX_NEEDED.get(kernel, set()):
            report.failures.append(f"{kernel}: PTX holds {never}")
        for name, body in functions_of(ptx).items():
            for part, wanted in PTX_LOOPS.items():
                if part not in name:
                    continue
                found[part] += 1
                for instruction, count in wanted.items():
                    whole = instruction if instruction[-1] in ".;" else instruction + " "
                    there = body.count(whole)
                    report.expect(
                        there >= count,
                        f"{kernel}, {part}: {there} x {instruction}, expected {count} or more",
                    )
            if "4move" in name or "run_foldIf" in name:
                report.expect(
                    longest_run(body, "ld.global.v4.b32") >= 4,
                    f"{kernel}, {name}: fewer than 4 loads in flight",
                )
    for part in PTX_LOOPS:
        report.expect(found[part] > 0, f"no function *{part}* in the PTX")
    print(f"PTX: {sum(found.values())} functions checked")


def longest_run(body: str, instruction: str) -> int:
    """The most `instruction`s with no store or branch between them."""
    longest = run = 0
    for line in body.splitlines():
        if instruction in line:
            run += 1
            longest = max(longest, run)
        elif re.search(r"\bst\.global|\bbra\b|\bcall\b", line):
            run = 0
    return longest


def check_sass(cuobjdump: str, build: Path, report: Report) -> None:
    for kernel in (*KERNELS, MULTIMEM):
        command = [cuobjdump, "-sass", str(build / "cuda" / f"{kernel}.o")]
        text = subprocess.run(command, check=True, capture_output=True, text=True).stdout
        for part in re.split(r"(?=^\s*arch = )", text, flags=re.M)[1:]:
            target = part.split("=", 1)[1].split()[0]
            codes = Counter(SASS_CODE.findall(part))
            if not codes:
                continue  # PTX
            multimem = {} if target == "sm_80" else SASS_MULTIMEM
            wanted = SASS | (multimem if kernel == MULTIMEM else SASS_PACKETS)
            for code, why in wanted.items():
                there = sum(n for name, n in codes.items() if name.startswith(code))
                report.expect(there > 0, f"{kernel}, {target}: no {code} ({why})")
            wide = codes["LDG.E.128"], codes["STG.E.128"]
            print(f"SASS {kernel:18} {target:8} LDG.E.128 {wide[0]:4}  STG.E.128 {wide[1]:4}")


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("build", type=Path)
    parser.add_argument("--nvcc", default="nvcc")
    parser.add_argument("--cuobjdump", default=shutil.which("cuobjdump"))
    arguments = parser.parse_args()
    report = Report()
    check_registers(arguments.build, report)
    check_ptx(arguments.nvcc, arguments.build, report)
    if arguments.cuobjdump:
        check_sass(arguments.cuobjdump, arguments.build, report)
    else:
        print("SASS: not looked at, as there is no cuobjdump (pip install nvidia-cuda-cuobjdump)")
    for failure in report.failures:
        print(f"check_build: {failure}", file=sys.stderr)
    return 1 if report.failures else 0


if __name__ == "__main__":
    sys.exit(main())
