// ---- gates ----
struct Gate {
    float g, beta;
};
struct GateInputs {
    u32 a, b;
    float a_log, dt_bias;
};
__device__ __forceinline__ GateInputs gate_inputs(const Params &p, const Work &w, int t) {
    GateInputs x = {0, 0, 0.f, 0.f};
    if (t >= w.rows) return x;
    x.a = read_gate(p.a, (w.start + t) * p.a_row + w.head, p.gates_f32);
    x.b = read_gate(p.b, (w.start + t) * p.b_row + w.head, p.gates_f32);
    x.a_log = early(p.a_log + w.head);
    x.dt_bias = early(p.dt_bias + w.head);
    return x;
}
__device__ __forceinline__ Gate gate_of(const Params &p, const Work &w, const GateInputs &x, int t) {
    Gate r = {0.f, 0.f};
    if (t >= w.rows) return r;
    float a = gate_value(x.a, p.gates_f32) + x.dt_bias;
    r.g = -expf(x.a_log) * (a > 20.f ? a : log1pf(expf(a)));
    r.beta = p.beta_scale / (1.f + expf(-gate_value(x.b, p.gates_f32)));
    return r;
}
__device__ __forceinline__ float inverse_norm(float sum) { return rsqrtf(sum + 1e-6f); }
