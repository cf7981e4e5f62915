// CUTLASS's reference for block scaled products, as a function for ctypes: 128 rows of weights times
// num_tokens rows of tokens. Scales lie as CUTLASS's own layout says.
#include "cute/tensor.hpp"
#include "cutlass/detail/sm100_blockscaled_layout.hpp"
#include "cutlass/numeric_types.h"
#include "cutlass/util/reference/host/gett.hpp"

extern "C" void cutlass_block_scaled(const uint8_t* weights, const uint8_t* tokens,
                                     const uint8_t* weight_scales, const uint8_t* token_scales,
                                     float* sums, int num_tokens, int columns) {
  using namespace cute;
  using Code = cutlass::float_e2m1_t;
  using Scale = cutlass::float_ue4m3_t;
  using Config = cutlass::detail::Sm1xxBlockScaledConfig<16>;
  const auto problem = make_shape(128, num_tokens, columns, 1);
  const auto matrix = [columns](const uint8_t* codes, int rows) {
    return make_tensor(recast_ptr<const Code>(codes),
                       make_layout(make_shape(rows, columns, 1), make_stride(columns, _1{}, 0)));
  };
  const auto a = matrix(weights, 128), b = matrix(tokens, num_tokens);
  const auto sfa = make_tensor(reinterpret_cast<const Scale*>(weight_scales),
                               Config::tile_atom_to_shape_SFA(problem));
  const auto sfb = make_tensor(reinterpret_cast<const Scale*>(token_scales),
                               Config::tile_atom_to_shape_SFB(problem));
  auto d = make_tensor(sums, make_layout(make_shape(128, num_tokens, 1),
                                         make_stride(num_tokens, _1{}, 0)));
  using namespace cutlass::reference::host;
  GettBlockScalingMainloopParams<float, decltype(a), decltype(sfa), decltype(b), decltype(sfb)>
      mainloop{a, sfa, b, sfb};
  GettBlockScalingEpilogueParams<float, float, float, decltype(d), decltype(d)> epilogue{1.f, 0.f,
                                                                                         d, d};
  Gemm3x(mainloop, epilogue);
}
