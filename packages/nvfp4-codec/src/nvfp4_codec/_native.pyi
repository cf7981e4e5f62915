"""The C++ extension. Addresses and sizes (in elements) in; nothing is checked there.

isa: a name from isa_names(), or "" for the fastest; ValueError if this machine lacks it.
dtype: 0 bfloat16, 1 float16, 2 float32. Every function releases the GIL.
"""

def isa_names() -> list[str]: ...
def amax(isa: str, threads: int, x: int, dtype: int, n: int) -> tuple[float, int]: ...
def quantize_nvfp4(
    isa: str,
    threads: int,
    x: int,
    dtype: int,
    n: int,
    global_scale: float,
    zero_block_scale: float,
    min_scale: float,
    keep_negative_zero: bool,
    saturate: bool,
    codes: int,
    scales: int,
) -> None: ...
def dequantize_nvfp4(
    isa: str,
    threads: int,
    codes: int,
    scales: int,
    global_scale: float,
    divide: bool,
    out: int,
    dtype: int,
    n: int,
) -> None: ...
def quantize_mxfp4(
    isa: str,
    threads: int,
    x: int,
    dtype: int,
    n: int,
    mode: int,
    saturate: bool,
    codes: int,
    scales: int,
) -> None: ...
def dequantize_mxfp4(
    isa: str, threads: int, codes: int, scales: int, out: int, dtype: int, n: int
) -> None: ...
def mxfp4_to_nvfp4(
    isa: str,
    threads: int,
    codes: int,
    scales: int,
    shift: int,
    n: int,
    codes_out: int,
    scales_out: int,
    lossless: int,
) -> int: ...
def quantize_fp8_block(
    isa: str,
    threads: int,
    x: int,
    dtype: int,
    rows: int,
    columns: int,
    block_rows: int,
    block_columns: int,
    ue8m0: bool,
    weight: int,
    scales: int,
) -> None: ...
def dequantize_fp8_block(
    isa: str,
    threads: int,
    weight: int,
    scales: int,
    out: int,
    dtype: int,
    rows: int,
    columns: int,
    block_rows: int,
    block_columns: int,
) -> None: ...
def bench_read(isa: str, threads: int, data: int, n: int) -> int: ...
def bench_write(isa: str, threads: int, out: int, n: int) -> None: ...
