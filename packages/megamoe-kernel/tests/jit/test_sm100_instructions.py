"""The inline PTX of ptx/sm100.cuh says what the PTX ISA asks for, and its fences reach the SASS.

The table is written from PTX ISA 9.0, by section, not from the header: an instruction with all its
qualifiers, and its operands in the ISA's order by the C++ names that they are given. Placeholders
are resolved here, so that neither renumbering them nor reordering operands goes unseen.
"""

from __future__ import annotations

import re
import subprocess
from collections import Counter
from importlib import metadata
from pathlib import Path

import pytest

from megamoe_kernel.buffer_layout import INCLUDE
from megamoe_kernel.jit.nvrtc import Nvrtc
from megamoe_kernel.models import MODELS
from megamoe_kernel.sm100_kernel import PAIR_TILINGS, TILINGS, Tiling, sm100_source

HEADER = INCLUDE / "megamoe" / "ptx" / "sm100.cuh"
#: Results are bound to PTX's predicate p, where they are selected from it: p != 0.
SELECT = "selp.u32 {}, 1, 0, p;"
BULK = "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes"
MMA = "tcgen05.mma.cta_group::{}.kind::mxf4nvf4.block_scale.block16"
LOAD = "tcgen05.ld.sync.aligned.16x256b.x2.b32"

#: By wrapper: its statements, of pairs after those of one CTA.
STATEMENTS: dict[str, list[list[str]]] = {
    # 9.7.14 elect.sync: d|p, membermask.
    "elect": [[".reg .pred p;", "elect.sync _|p, 0xFFFFFFFF;", SELECT.format("elected")]],
    # mbarrier.init [addr], count; the fence's only form is .release.cluster.
    "barrier_init": [["mbarrier.init.shared::cta.b64 [barrier], arrivals;"]],
    "fence_barrier_init": [["fence.mbarrier_init.release.cluster;"]],
    # Without .sem and .scope: .release, .cta. In another CTA's: .shared::cluster, the sink _ .
    "barrier_arrive": [["mbarrier.arrive.shared::cta.b64 _, [barrier];"]],
    "barrier_arrive_expect": [["mbarrier.arrive.expect_tx.shared::cta.b64 _, [barrier], bytes;"]],
    "barrier_arrive_at_leader": [
        [
            ".reg .b32 leader;",
            "mapa.shared::cluster.u32 leader, barrier, 0;",
            "mbarrier.arrive.release.cluster.shared::cluster.b64 _, [leader];",
        ]
    ],
    # Without .sem and .scope: .acquire, .cta. Who arrived in another CTA: .acquire.cluster.
    "barrier_test": [
        [
            ".reg .pred p;",
            "mbarrier.try_wait.parity.shared::cta.b64 p, [barrier], parity;",
            SELECT.format("done"),
        ],
        [
            ".reg .pred p;",
            "mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 p, [barrier], parity;",
            SELECT.format("done"),
        ],
    ],
    "pair_sync": [["barrier.cluster.arrive.release;", "barrier.cluster.wait.acquire;"]],
    # Of all state spaces: the copies read global memory, too.
    "fence_proxy_async": [["fence.proxy.async;"]],
    # cp.async.bulk [dstMem], [srcMem], size, [mbar] {, ctaMask}.
    "copy_bulk": [[f"{BULK} [to], [__cvta_generic_to_global(from)], bytes, [barrier];"]],
    "copy_bulk_to_pair": [
        [
            f"{BULK}.multicast::cluster "
            "[to], [__cvta_generic_to_global(from)], bytes, [barrier], kBothCtas;"
        ]
    ],
    # cp.async.bulk.tensor.2d [dstMem], [tensorMap, {x, y}], [mbar]: the innermost dimension first.
    "copy_box": [
        [
            "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes "
            "[to], [map, {x, y}], [barrier];"
        ]
    ],
    "tensor_alloc": [
        [f"tcgen05.alloc.cta_group::{n}.sync.aligned.shared::cta.b32 [to], columns;"]
        for n in (1, 2)
    ],
    "tensor_no_more_allocs": [
        [f"tcgen05.relinquish_alloc_permit.cta_group::{n}.sync.aligned;"] for n in (1, 2)
    ],
    "tensor_free": [
        [f"tcgen05.dealloc.cta_group::{n}.sync.aligned.b32 address, columns;"] for n in (1, 2)
    ],
    # .32x128b goes with .warpx4 only: 32 lanes to each of the four warps' lanes.
    "tensor_copy_scales": [
        [f"tcgen05.cp.cta_group::{n}.32x128b.warpx4 [to], from;"] for n in (1, 2)
    ],
    # [d-tmem], a-desc, b-desc, idesc, [scale-A-tmem], [scale-B-tmem], enable-input-d.
    "mma_nvfp4": [
        [
            ".reg .pred p;",
            "setp.ne.u32 p, static_cast<uint32_t>(accumulate), 0;",
            f"{MMA.format(n)} [d], a, b, instruction, [a_scales], [b_scales], p;",
        ]
        for n in (1, 2)
    ],
    # [mbar] {, ctaMask}; of a pair at the same offset in both CTAs.
    "tensor_commit": [
        ["tcgen05.commit.cta_group::1.mbarrier::arrive::one.shared::cluster.b64 [barrier];"],
        [
            "tcgen05.commit.cta_group::2.mbarrier::arrive::one.shared::cluster"
            ".multicast::cluster.b64 [barrier], kBothCtas;"
        ],
    ],
    "tensor_fence_before": [["tcgen05.fence::before_thread_sync;"]],
    "tensor_fence_after": [["tcgen05.fence::after_thread_sync;"]],
    # 16 lanes each, of these a thread has four values, then four of eight columns on. out: four of
    # the first 16 lanes, four of the next, then those of eight columns on.
    "tensor_load_32x16": [
        [
            f"{LOAD} {{out[0], out[1], out[2], out[3], out[8], out[9], out[10], out[11]}}, [from];",
            f"{LOAD} {{out[4], out[5], out[6], out[7], out[12], out[13], out[14], out[15]}}, "
            "[tensor_address(from, 16, 0)];",
            "tcgen05.wait::ld.sync.aligned;",
        ]
    ],
    "registers_up": [["setmaxnreg.inc.sync.aligned.u32 kRegisters;"]],
    "registers_down": [["setmaxnreg.dec.sync.aligned.u32 kRegisters;"]],
}
#: What the compiler may move or drop: nothing that touches memory or a barrier.
WITHOUT_MEMORY = {"elect", "registers_up", "registers_down"}


def split(text: str, at: str = ",") -> list[str]:
    """At commas, say, outside all brackets and strings."""
    parts, depth, quoted = [""], 0, False
    for character in text:
        quoted ^= character == '"'
        if not quoted:
            depth += (character in "([{") - (character in ")]}")
        if character == at and depth == 0 and not quoted:
            parts.append("")
        else:
            parts[-1] += character
    return [part.strip() for part in parts]


def enclosed(text: str, begin: int) -> str:
    """What stands in the parentheses that open at `begin`."""
    depth, quoted = 0, False
    for at in range(begin, len(text)):
        quoted ^= text[at] == '"'
        if not quoted:
            depth += (text[at] == "(") - (text[at] == ")")
        if depth == 0:
            return text[begin + 1 : at]
    raise AssertionError("parentheses do not close")


def statements(asm: str) -> tuple[list[str], bool]:
    """An asm's statements, C++ in place of placeholders; whether it clobbers memory."""
    code, *lists = split(asm, ":")
    names = []
    for operand in (each for part in lists[:2] for each in split(part) if each):
        match = re.fullmatch(r'"=?[rlhfn]"\s*\((.*)\)', operand, re.S)
        assert match is not None, operand
        names.append(match[1])
    text = "".join(re.findall(r'"([^"]*)"', code)).replace(r"\n", " ")
    used = {int(number) for number in re.findall(r"%(\d+)", text)}
    assert used == set(range(len(names))), "placeholders and operands differ"
    text = re.sub(r"%(\d+)", lambda found: names[int(found[1])], text)
    if text.startswith("{"):
        assert text.endswith("}")
        text = text[1:-1]
    found = [" ".join(part.split()) + ";" for part in text.split(";") if part.strip()]
    return found, lists[2:] == ['"memory"']


def bodies() -> dict[str, str]:
    """Each wrapper's definition, from its name on, without comments."""
    text = re.sub(r"//[^\n]*", "", HEADER.read_text())
    text = re.sub(r"#define (?:[^\n]*\\\n)*[^\n]*\n", "", text)
    parts = re.split(r"__device__ __forceinline__ \w+ (\w+)\(", text)
    return dict(zip(parts[1::2], parts[2::2], strict=True))


def asms(body: str) -> list[str]:
    """An asm for one CTA, and then that for a pair, if it differs."""
    found = re.search(r"MEGAMOE_CTA_GROUP(?=\()", body)
    if found is None:
        return [enclosed(body, match.end()) for match in re.finditer(r"asm volatile(?=\()", body)]
    before, after, *rest = split(enclosed(body, found.end()))
    return [
        f'{before} ".cta_group::{ctas}" {after} {", ".join(rest)} : "memory"' for ctas in (1, 2)
    ]


def test_every_wrapper_is_in_the_table() -> None:
    assert {name for name, body in bodies().items() if asms(body)} == set(STATEMENTS)
    assert set(bodies()) - set(STATEMENTS) == {"shared_address"}


@pytest.mark.parametrize("name", STATEMENTS)
def test_the_ptx_is_what_the_isa_asks_for(name: str) -> None:
    found = [statements(asm) for asm in asms(bodies()[name])]
    assert [each for each, _ in found] == STATEMENTS[name]
    assert [clobbers for _, clobbers in found] == [name not in WITHOUT_MEMORY] * len(found)
    if len(found) == 2:  # that of one CTA comes first
        assert re.search(r"if constexpr \(kCtas == 1\)|MEGAMOE_CTA_GROUP\(", bodies()[name])


def test_the_macro_and_the_mask() -> None:
    text = " ".join(HEADER.read_text().replace("\\\n", "").split())
    assert "kBothCtas = 0b11;" in text
    assert (
        "#define MEGAMOE_CTA_GROUP(BEFORE, AFTER, ...) if constexpr (kCtas == 1) { "
        'asm volatile(BEFORE ".cta_group::1" AFTER __VA_ARGS__ : "memory"); } else { '
        'asm volatile(BEFORE ".cta_group::2" AFTER __VA_ARGS__ : "memory"); }'
    ) in text


def _nvdisasm() -> str:
    for distribution in metadata.distributions():
        if distribution.metadata["Name"] == "triton":
            for file in distribution.files or ():
                if file.name == "nvdisasm":
                    return str(file.locate())
    pytest.skip("needs nvdisasm, which triton brings")


@pytest.mark.parametrize(
    "tiling", [TILINGS[-1], PAIR_TILINGS[-1]], ids=lambda t: f"{t.ctas} x {t.block_rows}"
)
def test_fences_and_barriers_are_in_the_machine_code(
    tiling: Tiling, nvrtc: Nvrtc, tmp_path: Path
) -> None:
    # tcgen05.fence and fence.mbarrier_init print as nothing: their place is in the text alone.
    source = sm100_source(MODELS["deepseek-v4-pro"], 8, 32768, tiling)
    path = tmp_path / "kernel.cubin"
    path.write_bytes(nvrtc.compile(source.name, source.text, "sm_100a", ()))
    code = subprocess.run(
        [_nvdisasm(), "-c", str(path)], check=True, capture_output=True, text=True
    ).stdout
    names = re.findall(r"^\s+/\*[0-9a-f]+\*/\s+(?:@!?U?P\d+\s+)?([A-Z][A-Z0-9_.a-z]*)", code, re.M)
    counts, pair = Counter(names), tiling.ctas == 2

    # fence.proxy.async: of shared memory alone it would be without the barrier of the GPU's memory.
    before_fences = [names[at - 1] for at, n in enumerate(names) if n == "FENCE.VIEW.ASYNC.S"]
    assert "MEMBAR.ALL.GPU" in before_fences
    # pair_sync at the start and at the end, each once more for a warp that has diverged. Released
    # with the cluster as scope: what a relaxed arrival lacks.
    before_arrivals = [names[at - 1] for at, name in enumerate(names) if name == "UCGABAR_ARV"]
    assert before_arrivals == ["CGAERRBAR"] * (4 if pair else 0)
    assert counts["UCGABAR_WAIT"] == len(before_arrivals)
    # tcgen05.commit, the stage's and the sums': in a pair to both CTAs.
    assert counts["UTCBAR.2CTA.MULTICAST" if pair else "UTCBAR"] == 2
    # Arrivals at the leader's barriers are those of a cluster; nobody else makes any.
    assert (counts["SYNCS.ARRIVE.TRANS64.RED.A1T0"] > 0) == pair
