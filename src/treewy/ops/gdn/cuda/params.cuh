// One step of the gated delta rule for K = V = 128: commit of the prior rows, then verify of the tree. No headers: NVRTC compiles it.
//
// A block owns BV = 16 MT NW rows of one head's state [V, K], a warp 16 MT of them: they are the M operand of its matrix
// products, rows of the tree the N operand. All rows come in as asynchronous copies of whole rows, two dependent loads after
// the start: what the block works on, then everything else. What depends on no state (grams, decays, the inverse) is
// computed while the state is in flight. A row's arithmetic does not depend on BT, MT or NW, nor on what else runs.
//
// The unknowns of the solve are w = u / |k|, what a record holds: with them every norm scales a row of the system, none a column.
//
// Macros: BT rows of the largest tree (4, 16, 32, 48, 64), NW warps, MT, STATE_F32, U_F32 (dtype of pseudo-values in records
// and histories), PARTS bfloat16 parts of an fp32 state, EXACT, PMAX prior rows (a multiple of 16), LEAN: what comes late lies
// where something else is done with: values in place of the keys (up to 32 rows), the state in place of the system (beyond).
// STAGES, for measurements: 1 the state's products, 2 the grams, 3 the solve, 4 all.

typedef unsigned int u32;
typedef unsigned short u16;
typedef unsigned long long u64;
typedef long long i64;

#define DIM 128
#define BV (16 * MT * NW)
#define VB (DIM / BV)
#define NT (BT / 8)
#define LDK 136           // halves of a row of 128 in shared memory: 16 bytes past a multiple of 128, for ldmatrix
#define LDS 136           // elements of a row of the state: in float32, 8-byte accesses of 4 rows meet in no bank
#define LDP (PMAX + 8)
#define CHUNKS (PMAX / 16)
#define BLOCKS (BT / 16)  // of 16 rows
#define TRIANGLE (BLOCKS * (BLOCKS + 1) / 2)
#define LDA 20            // of a block of 16 x 16 in float32
#define EARLY_VALUES (BT <= 32 && !LEAN)
#define EARLY_STATE (BT <= 32 || !LEAN)
#define QSCALE 0.08838834764831845f
#define MAX_FLOAT 3.402823466e38f

#if U_F32
typedef float ut;
#define LDU (BV + 4)
#else
typedef u16 ut;
#define LDU (BV + 8)
#endif
#if STATE_F32
typedef float st;
#define SPARTS PARTS
#else
typedef u16 st;
#define SPARTS 1
#endif
#if EXACT
#define XPARTS 3
#else
#define XPARTS 1
#endif
#define FPARTS (STATE_F32 ? 3 : 2)  // of pseudo-values that are folded

struct Params {
    const u16 *q, *k, *v;
    const void *a, *b;
    const float *a_log, *dt_bias;
    void *state;
    const int *slots, *places, *cu_rows, *ancestors;
    void *hist_u;
    u16 *hist_k;
    float *hist_high, *hist_low;
    const int *hist_len, *held;
    const void *rec_u;
    const u16 *rec_k;
    const float *rec_high, *rec_low;
    const int *path_rows, *path_len, *fold;
    u16 *o;
    void *u_out;
    u16 *k_out;
    float *high_out, *low_out;
    i64 q_row, q_head, k_row, k_head, v_row, v_head, a_row, b_row, state_slot, state_head;
    i64 hu_slot, hu_row, hu_head, hk_slot, hk_row, hk_head, hg_slot, hg_row, hg_head;
    i64 ru_row, ru_head, rk_row, rk_head, rg_row, rg_head;
    i64 o_row, o_head, uo_row, uo_head, ko_row, ko_head, go_row, go_head;
    int num_seqs, num_rows, group, num_slots, num_places, words, capacity, gates_f32, group_inverse, path_width, max_rows, num_record_rows;
    float beta_scale;
};
