// Python's view of the operations: addresses and sizes in, nothing of torch linked.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include "dispatch.h"
#include "float_environment.h"
#include "operations.h"

namespace py = pybind11;

namespace nvfp4 {
namespace {

const uint8_t* input(uintptr_t address) { return reinterpret_cast<const uint8_t*>(address); }
uint8_t* output(uintptr_t address) { return reinterpret_cast<uint8_t*>(address); }

std::vector<std::string> isa_names() {
  std::vector<std::string> names;
  for (const Kernels* kernels : supported_kernels()) names.emplace_back(kernels->name);
  return names;
}

// Numbers cross as doubles: converted outside the guard, a float could be flushed to zero.
using Guarded = py::call_guard<py::gil_scoped_release, DefaultFloatEnvironment>;

void register_nvfp4(py::module_& module) {
  module.def(
      "amax",
      [](const std::string& isa, int threads, uintptr_t x, int dtype, int64_t n) {
        const Amax found = amax(kernels_for(isa), threads, input(x), dtype, n);
        return std::pair(static_cast<double>(found.value), found.nonfinite);
      },
      Guarded());
  module.def(
      "quantize_nvfp4",
      [](const std::string& isa, int threads, uintptr_t x, int dtype, int64_t n,
         double global_scale, double zero_block_scale, double min_scale,
         bool keep_negative_zero, bool saturate, uintptr_t codes, uintptr_t scales) {
        const NVFP4Rules rules{static_cast<float>(global_scale),
                               static_cast<float>(zero_block_scale),
                               static_cast<float>(min_scale), keep_negative_zero};
        quantize_nvfp4(kernels_for(isa), threads, input(x), dtype, n, rules, saturate,
                       output(codes), output(scales));
      },
      Guarded());
  module.def(
      "dequantize_nvfp4",
      [](const std::string& isa, int threads, uintptr_t codes, uintptr_t scales,
         double global_scale, bool divide, uintptr_t out, int dtype, int64_t n) {
        dequantize_nvfp4(kernels_for(isa), threads, input(codes), input(scales),
                         static_cast<float>(global_scale), divide, output(out), dtype, n);
      },
      Guarded());
}

void register_mxfp4(py::module_& module) {
  module.def(
      "quantize_mxfp4",
      [](const std::string& isa, int threads, uintptr_t x, int dtype, int64_t n, int mode,
         bool saturate, uintptr_t codes, uintptr_t scales) {
        quantize_mxfp4(kernels_for(isa), threads, input(x), dtype, n, kMXFloor + mode, saturate,
                       output(codes), output(scales));
      },
      Guarded());
  module.def(
      "dequantize_mxfp4",
      [](const std::string& isa, int threads, uintptr_t codes, uintptr_t scales, uintptr_t out,
         int dtype, int64_t n) {
        dequantize_mxfp4(kernels_for(isa), threads, input(codes), input(scales), output(out),
                         dtype, n);
      },
      Guarded());
  module.def(
      "mxfp4_to_nvfp4",
      [](const std::string& isa, int threads, uintptr_t codes, uintptr_t scales, int shift,
         int64_t n, uintptr_t codes_out, uintptr_t scales_out, uintptr_t lossless) {
        return mxfp4_to_nvfp4(kernels_for(isa), threads, input(codes), input(scales), shift, n,
                              output(codes_out), output(scales_out), output(lossless));
      },
      Guarded());
}

void register_fp8_block(py::module_& module) {
  module.def(
      "quantize_fp8_block",
      [](const std::string& isa, int threads, uintptr_t x, int dtype, int64_t rows,
         int64_t columns, int64_t block_rows, int64_t block_columns, bool ue8m0, uintptr_t weight, uintptr_t scales) {
        quantize_fp8_block(kernels_for(isa), threads, input(x), dtype, rows, columns, block_rows,
                           block_columns, ue8m0, output(weight), output(scales));
      },
      Guarded());
  module.def(
      "dequantize_fp8_block",
      [](const std::string& isa, int threads, uintptr_t weight, uintptr_t scales, uintptr_t out,
         int dtype, int64_t rows, int64_t columns, int64_t block_rows, int64_t block_columns) {
        dequantize_fp8_block(kernels_for(isa), threads, input(weight), input(scales), output(out),
                             dtype, rows, columns, block_rows, block_columns);
      },
      Guarded());
}

void register_benchmarks(py::module_& module) {
  module.def(
      "bench_read",
      [](const std::string& isa, int threads, uintptr_t in, int64_t n) {
        return bench_read(kernels_for(isa), threads, input(in), n);
      },
      Guarded());
  module.def(
      "bench_write",
      [](const std::string& isa, int threads, uintptr_t out, int64_t n) {
        bench_write(kernels_for(isa), threads, output(out), n);
      },
      Guarded());
}

}  // namespace
}  // namespace nvfp4

PYBIND11_MODULE(_native, module, py::mod_gil_not_used()) {
  module.doc() = "C++ kernels of nvfp4_codec; native.py is their checked front.";
  module.def("isa_names", &nvfp4::isa_names);
  nvfp4::register_nvfp4(module);
  nvfp4::register_mxfp4(module);
  nvfp4::register_fp8_block(module);
  nvfp4::register_benchmarks(module);
}
