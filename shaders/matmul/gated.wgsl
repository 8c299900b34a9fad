// The gated unit act(gate) * up of SwiGLU and GeGLU (Shazeer 2020, arXiv:2002.05202). No infinity arises for any finite gate.
// GELU by tanh: Hendrycks & Gimpel 2016, arXiv:1606.08415, with 1 + tanh(y / 2) = 2 / (1 + exp(-y)). The including file
// declares GELU: 0 takes SiLU(y) = y / (1 + exp(-y)), else GELU.
fn gated(gate: f32, up: f32) -> f32 {
  var y = gate;
  if (GELU != 0u) {
    let g = clamp(gate, -20.0, 20.0);    // beyond, the result is 0 or gate in f32
    y = 1.5957691216057308 * g * fma(0.044715 * g, g, 1.0);
  }
  return gate / (1.0 + exp(min(-y, 80.0))) * up;
}
