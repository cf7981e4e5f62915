"""The inline PTX of ptx/sm100.cuh says what the PTX ISA asks for, and its fences reach the SASS.

The table is written from PTX ISA 9.0, by section, not from the header: an instruction with all its
qualifiers, and its operands in the ISA's order by the C++ names that they are given. Placeholders
are resolved here, so that neither renumbering them nor reordering operands goes unseen.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable
from functools import cache

import pytest

from megamoe_kernel.buffer_layout import INCLUDE
from megamoe_kernel.buffer_sizes import MOST_RING_ROWS
from megamoe_kernel.jit.cache import CubinCache
from megamoe_kernel.jit.compile import compile_kernel
from megamoe_kernel.jit.nvrtc import Nvrtc
from megamoe_kernel.jit.targets import Target
from megamoe_kernel.models import MODELS
from megamoe_kernel.sm100_kernel import TARGETS, Tiling, all_tilings, pair_tilings, sm100_source

pytest.importorskip("megamoe_kernel._native", reason="needs the compiled extension")

HEADER = INCLUDE / "megamoe" / "ptx" / "sm100.cuh"
#: Results are bound to PTX's predicate p, where they are selected from it: p != 0.
SELECT = "selp.u32 {}, 1, 0, p;"
BULK = "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes"
BOX = "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes"
MMA = "tcgen05.mma.cta_group::{}.kind::mxf4nvf4.block_scale.block16"
LOAD = "tcgen05.ld.sync.aligned.16x256b.x2.b32"
STORE = "tcgen05.st.sync.aligned.16x256b.x2.b32"

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
    # cp.async.bulk.tensor.2d [dstMem], [tensorMap, {x, y}], [mbar] {, ctaMask}: the innermost
    # dimension first; without .load_mode: .tile.
    "copy_box": [[f"{BOX} [to], [map, {{x, y}}], [barrier];"]],
    "copy_box_to_pair": [
        [f"{BOX}.multicast::cluster [to], [map, {{x, y}}], [barrier], kBothCtas;"]
    ],
    "tensor_alloc": [
        [f"tcgen05.alloc.cta_group::{n}.sync.aligned.shared::cta.b32 [to], columns;"]
        for n in (1, 2)
    ],
    "tensor_no_more_allocs": [
        [f"tcgen05.relinquish_alloc_permit.cta_group::{n}.sync.aligned;"] for n in (1, 2)
    ],
    # What the allocation stored is read as any word of shared memory.
    "tensor_allocated": [["ld.shared::cta.u32 address, [from];"]],
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
    # [taddr], r: the registers as a load has them. .wait::st waits for stores, .wait::ld does not.
    "tensor_store_32x16": [
        [
            f"{STORE} [to], {{values[0], values[1], values[2], values[3], "
            "values[8], values[9], values[10], values[11]};",
            f"{STORE} [tensor_address(to, 16, 0)], {{values[4], values[5], values[6], values[7], "
            "values[12], values[13], values[14], values[15]};",
            "tcgen05.wait::st.sync.aligned;",
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


@pytest.mark.parametrize(
    "tiling", [all_tilings()[-1], pair_tilings()[-1]], ids=lambda t: f"{t.ctas} x {t.block_rows}"
)
def test_fences_and_barriers_are_in_the_machine_code(
    tiling: Tiling, nvrtc: Nvrtc, shared_cache: CubinCache, run_tool: Callable[..., str]
) -> None:
    # tcgen05.fence and fence.mbarrier_init print as nothing: their place is in the text alone.
    source = sm100_source(MODELS["deepseek-v4-pro"], 8, MOST_RING_ROWS, tiling)
    cubin = compile_kernel(source, "sm_100a", cache=shared_cache).cubin
    code = run_tool("nvdisasm", cubin, "-c")
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


#: By wrapper: parameters of a kernel that calls it, the call; ``{}`` stands for kCtas.
CALLS: dict[str, tuple[str, str]] = {
    "elect": ("uint32_t* out", "*out = elect()"),
    "barrier_init": ("uint32_t barrier, int arrivals", "barrier_init(barrier, arrivals)"),
    "fence_barrier_init": ("", "fence_barrier_init()"),
    "barrier_arrive": ("uint32_t barrier", "barrier_arrive(barrier)"),
    "barrier_arrive_expect": ("uint32_t barrier, int n", "barrier_arrive_expect(barrier, n)"),
    "barrier_arrive_at_leader": ("uint32_t barrier", "barrier_arrive_at_leader(barrier)"),
    "barrier_test": (
        "uint32_t barrier, uint32_t parity, uint32_t* out",
        "*out = barrier_test<{}>(barrier, parity)",
    ),
    "pair_sync": ("", "pair_sync()"),
    "fence_proxy_async": ("", "fence_proxy_async()"),
    "copy_bulk": (
        "uint32_t to, uint32_t barrier, const void* from, int n", "copy_bulk(to, from, n, barrier)",
    ),
    "copy_bulk_to_pair": (
        "uint32_t to, uint32_t barrier, const void* from, int n",
        "copy_bulk_to_pair(to, from, n, barrier)",
    ),
    "copy_box": (
        "const void* map, uint32_t to, uint32_t barrier, int x, int y",
        "copy_box(to, map, x, y, barrier)",
    ),
    "copy_box_to_pair": (
        "const void* map, uint32_t to, uint32_t barrier, int x, int y",
        "copy_box_to_pair(to, map, x, y, barrier)",
    ),
    "tensor_alloc": ("uint32_t to, int columns", "tensor_alloc<{}>(to, columns)"),
    "tensor_no_more_allocs": ("", "tensor_no_more_allocs<{}>()"),
    "tensor_allocated": ("uint32_t from, uint32_t* out", "*out = tensor_allocated(from)"),
    "tensor_free": ("uint32_t address, int columns", "tensor_free<{}>(address, columns)"),
    "tensor_copy_scales": ("uint32_t to, uint64_t from", "tensor_copy_scales<{}>(to, from)"),
    "mma_nvfp4": (
        "uint32_t d, uint64_t a, uint64_t b, uint32_t instruction, bool accumulate, "
        "uint32_t a_scales, uint32_t b_scales",
        "mma_nvfp4<{}>(d, a, b, instruction, accumulate, a_scales, b_scales)",
    ),
    "tensor_commit": ("uint32_t barrier", "tensor_commit<{}>(barrier)"),
    "tensor_fence_before": ("", "tensor_fence_before()"),
    "tensor_fence_after": ("", "tensor_fence_after()"),
    "tensor_load_32x16": (
        "uint32_t from, float* out",
        "float sums[16]; tensor_load_32x16(from, sums); "
        "for (int i = 0; i < 16; ++i) out[i] = sums[i]",
    ),
    "tensor_store_32x16": (
        "uint32_t to, const float* from",
        "float values[16]; for (int i = 0; i < 16; ++i) values[i] = from[i]; "
        "tensor_store_32x16(to, values)",
    ),
    "registers_up": ("", "registers_up<176>()"),
    "registers_down": ("", "registers_down<80>()"),
}  # fmt: skip
PHASE = "SYNCS.PHASECHK.TRANS64.TRYWAIT P0, [barrier], R#"
FENCES_OF_A_CLUSTER = ["MEMBAR.ALL.GPU", "CGAERRBAR"]
#: What ptxas makes of each, for one CTA and then for a pair if that differs: of a kernel with one
#: call, all instructions of these engines, with parameters by their names; # is any number. An
#: operand of two registers has the name of the first one's parameter. Three fences print nothing.
MACHINE_CODE: dict[str, list[list[str]]] = {
    "elect": [["ELECT P0, URZ, PT"]],
    "barrier_init": [["SYNCS.EXCH.64 URZ, [barrier], UR#"]],
    "fence_barrier_init": [[]],
    # A1T0: one arrival, no bytes.
    "barrier_arrive": [["SYNCS.ARRIVE.TRANS64.A1T0 RZ, [barrier], RZ"]],
    "barrier_arrive_expect": [["SYNCS.ARRIVE.TRANS64 RZ, [barrier], n"]],
    "barrier_arrive_at_leader": [
        ["MEMBAR.ALL.CTA", *FENCES_OF_A_CLUSTER, "SYNCS.ARRIVE.TRANS64.RED.A1T0 RZ, [UR#], RZ"]
    ],
    # What another CTA released is acquired: what is cached of before is dropped.
    "barrier_test": [[PHASE], [PHASE, "CCTL.IVALL"]],
    "pair_sync": [[*FENCES_OF_A_CLUSTER, "UCGABAR_ARV", "UCGABAR_WAIT", "CCTL.IVALL"]],
    "fence_proxy_async": [["MEMBAR.ALL.GPU", "FENCE.VIEW.ASYNC.S"]],
    # [to and barrier], [from], bytes.
    "copy_bulk": [["UBLKCP.S.G [to], [from], UR#"]],
    "copy_bulk_to_pair": [["UBLKCP.S.G.MULTICAST [to], [from], UR#"]],
    "copy_box": [["UTMALDG.2D [to], [map]"]],
    # The mask in the upper half.
    "copy_box_to_pair": [["UTMALDG.2D.MULTICAST [to], [map], 0x30000"]],
    "tensor_alloc": [
        ["UTCATOMSWS.FIND_AND_SET.ALIGN UP0, UR#, UR#"] * 2,
        ["UTCATOMSWS.2CTA.FIND_AND_SET.ALIGN UP0, UR#, UR#"] * 2,
    ],
    "tensor_no_more_allocs": [["UVIRTCOUNT.DEALLOC.SMPOOL 0x80"]] * 2,
    "tensor_allocated": [["LDS R#, [from]"]],
    "tensor_free": [["UTCATOMSWS.AND URZ, UR#"]] * 2,
    "tensor_copy_scales": [
        ["UTCCP.T.S.4x32dp128bit tmem[to], gdesc[from]"],
        ["UTCCP.T.S.2CTA.4x32dp128bit tmem[to], gdesc[from]"],
    ],
    # 4X is BLOCK16 in sm_103a's. The predicate is whether sums are kept.
    "mma_nvfp4": [
        [
            f"UTCOMMA{pair}.4X gdesc[a], gdesc[b], tmem[d], tmem[URZ], idesc[instruction], "
            "tmem[a_scales], UP0"
        ]
        for pair in ("", ".2CTA")
    ],
    "tensor_commit": [["UTCBAR [barrier], URZ"], ["UTCBAR.2CTA.MULTICAST [barrier], URZ, 0x3"]],
    "tensor_fence_before": [[]],
    "tensor_fence_after": [[]],
    "tensor_load_32x16": [
        [
            "LDTM.16dp256bit.x2 R#, tmem[from]",
            "LDTM.16dp256bit.x2 R#, tmem[from+0x100000]",
        ]
    ],
    "tensor_store_32x16": [
        [
            "STTM.16dp256bit.x2 tmem[to], R#",
            "STTM.16dp256bit.x2 tmem[to+0x100000], R#",
            "FENCE.VIEW.ASYNC.T",  # .wait::st; .wait::ld prints nothing
        ]
    ],
    "registers_up": [["USETMAXREG.TRY_ALLOC.CTAPOOL UP0, 0xb0"]],
    "registers_down": [["USETMAXREG.DEALLOC.CTAPOOL 0x50"]],
}
ENGINES = r"UT|LDTM|STTM|UBLKCP|SYNCS|FENCE|MEMBAR|CCTL|UCGABAR|CGAERRBAR|USETMAXREG|UVIRTCOUNT"
#: Allocation keeps a record in shared memory of its own, with barriers for a pair.
ENGINES_OF = {"elect": "ELECT", "tensor_allocated": "LDS", "tensor_alloc": "UT|UVIRT"}


def probes(name: str) -> list[str]:
    """The kernels that call a wrapper, one for each kCtas."""
    many = "{}" in CALLS[name][1]
    return [f"probe_{name}_{ctas}" for ctas in ((1, 2) if many else (1,))]


def probe_program() -> str:
    kernels = "".join(
        f"__global__ void __launch_bounds__(512, 1) {kernel}({parameters}) "
        f"{{ {call.format(kernel[-1])}; }}\n"
        for name, (parameters, call) in CALLS.items()
        for kernel in probes(name)
    )
    return (
        '#include "megamoe/ptx/sm100.cuh"\nusing namespace megamoe::ptx;\n'
        f'extern "C" {{\n{kernels}}}\n'
    )


def parameters_at(parameters: str) -> dict[int, str]:
    """Where a kernel's parameters are in constant memory."""
    at, found = 0x380, {}
    for parameter in filter(None, parameters.split(", ")):
        kind, name = parameter.rsplit(" ", 1)
        size = 8 if "*" in kind or "64" in kind else 1 if kind == "bool" else 4
        at = -(-at // size) * size
        found[at] = name
        at += size
    return found


def machine_code_of(code: str, kernel: str, parameters: str) -> list[str]:
    """A kernel's instructions in order, without predicates; what a register got from a parameter,
    by the parameter's name.
    """
    _, *sections = re.split(r"^//-+ \.text\.(\w+) +-+$", code, flags=re.M)
    text = dict(zip(sections[::2], sections[1::2], strict=True))[kernel]
    text = text.partition(".weak")[0]  # subroutines that trap follow
    names, held, found = parameters_at(parameters), dict[str, str](), []
    for line in re.findall(r"^\s+/\*[0-9a-f]+\*/\s+(?:@!?U?P\d+ +)?(.*?) *;", text, re.M):
        found.append(re.sub(r"\bU?R\d+\b", lambda match: held.get(match[0], match[0]), line))
        written = re.match(r"(\S+) (U?R)(\d+), (.*)", line)
        if written is None:
            continue
        operation, kind, number, source = written.groups()
        loaded = re.match(r"c\[0x0\]\[0x([0-9a-f]+)\]$", source)
        for k in range(2 if ".64" in operation else 1):
            held.pop(f"{kind}{int(number) + k}", None)
            at = int(loaded[1], 16) + 4 * k if loaded else -1
            if at in names:
                held[f"{kind}{int(number) + k}"] = names[at]
        if operation == "UMOV" and re.fullmatch(r"0x[0-9a-f]+|URZ", source):
            held[f"{kind}{number}"] = source
    return found


@pytest.fixture(scope="module")
def probed(nvrtc: Nvrtc, run_tool: Callable[..., str]) -> Callable[[Target], str]:
    @cache
    def of(target: Target) -> str:
        return run_tool("nvdisasm", nvrtc.compile("probes", probe_program(), target, ()), "-c")

    return of


def test_every_wrapper_is_probed() -> None:
    assert set(CALLS) == set(MACHINE_CODE) == set(STATEMENTS)
    for name in CALLS:
        assert len(MACHINE_CODE[name]) in (1, len(probes(name)))
        # As many as the text has: one for each kCtas.
        assert len(STATEMENTS[name]) == len(probes(name))


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("name", CALLS)
def test_the_machine_code_of_every_wrapper(
    name: str, target: Target, probed: Callable[[Target], str]
) -> None:
    for kernel, expected in zip(probes(name), MACHINE_CODE[name], strict=True):
        code = machine_code_of(probed(target), kernel, CALLS[name][0])
        engines = re.compile(ENGINES_OF.get(name, ENGINES))
        found = [line for line in code if engines.match(line)]
        wanted = [re.escape(line).replace(r"\#", r"\d+") for line in expected]
        if target == "sm_103a":
            wanted = [line.replace(r"\.4X", r"\.BLOCK16") for line in wanted]
        assert len(found) == len(wanted), found
        for line, pattern in zip(found, wanted, strict=True):
            assert re.fullmatch(pattern, line), (line, pattern)


@pytest.mark.parametrize("target", TARGETS)
def test_where_the_load_puts_its_registers(target: Target, probed: Callable[[Target], str]) -> None:
    # As the epilogue reads them: four of the first lanes, of the next, then of eight columns on.
    code = machine_code_of(probed(target), "probe_tensor_load_32x16_1", "")
    first, second = (
        int(found[1]) for line in code if (found := re.match(r"LDTM\S* R(\d+), ", line))
    )
    stored = {
        int(found[1] or "0", 16) // 4: int(found[2])
        for line in code
        if (found := re.match(r"STG\S* .*\.64(?:\+0x([0-9a-f]+))?\], R(\d+)$", line))
    }
    assert stored == registers_of(first, second)


@pytest.mark.parametrize("target", TARGETS)
def test_where_the_store_takes_its_registers(
    target: Target, probed: Callable[[Target], str]
) -> None:
    code = machine_code_of(probed(target), "probe_tensor_store_32x16_1", "")
    first, second = (
        int(found[1]) for line in code if (found := re.match(r"STTM\S* .*\], R(\d+)$", line))
    )
    loaded = {
        int(found[2] or "0", 16) // 4: int(found[1])
        for line in code
        if (found := re.match(r"LDG\.E R(\d+), .*\.64(?:\+0x([0-9a-f]+))?\]$", line))
    }
    assert loaded == registers_of(first, second)


def registers_of(first: int, second: int) -> dict[int, int]:
    """Which of 16 values is in which register, of two blocks of eight."""
    blocks = [first, second, first + 4, second + 4]
    return {4 * i + j: block + j for i, block in enumerate(blocks) for j in range(4)}
