// Logits of a loss head on Hopper (sm_90a): hidden [R, H] times weight [V, H]^T in bf16 with float32
// accumulators, and what is wanted of them taken in the epilogue. No logits are written to memory.
//
// MODE 0  row statistics of each block of 256 vocabulary entries
// MODE 1  the same, and exp2(t - shift[row]) as bf16 with the target's entry 0
// MODE 2  the gradient of the raw logits as bf16, given each row's log-sum-exp
//
// t is a transformed logit in units of log 2: t = row_scale[row] * f(x + bias[v]), f(a) = a or
// tanh(cap * a). Compile-time constants: MODE, BIAS, CAP (0 or 1), MOMENTS (statistics of entropy,
// sum p^2 and mean as well), WEIGHTED (MODE 2: sum_v gradient_v log2 p_v per row and block).
//
// NOTE [What does not shorten the epilogue]
// It is bound by its instructions, not by waiting: at depth 4096 it costs 4 to 7 %, at 576 a third
// of MODE 0 and half of MODE 1. Tried on an H200 without gain: starting one warpgroup 1 to 4 steps
// before the other, both rows of a lane at once in four chains of sums, a polynomial for the tanh
// within 0.7 of the cap. The tensor cores would have to work on a second tile meanwhile, for which
// there are no registers.
//
// NOTE [Why every addition and multiplication of a statistic is an intrinsic]
// A compiler may contract a * b + c or not, differently in MODE 0 and 1, with MOMENTS or without.
// Scoring and training must agree in every bit, or a policy's first ratio is not 1; intrinsics with
// a named rounding are never contracted.
//
// NOTE [Why the shift of a block is a whole number]
// exp2(t - shift) of one block becomes that of another shift by a power of two, which is exact: the
// statistics (shifted by the block's own maximum) and the stored exponentials (by the row's) are
// the same numbers, computed once.

#include "gemm.cuh"

struct Arguments {
  const long long* target;  // [rows]
  const float* row_scale;   // [rows]
  const float* bias;        // [vocab], BIAS
  const float* shift;       // [rows], MODE 1: a whole number
  const float* gradient;    // [7, rows], MODE 2: log2-sum-exp, a, b, c, d, at the target, log2 p_y
  float* target_info;       // [2, rows], MODE 0 and 1: t of the target, 1 if an earlier t ties or beats it
  float* partial;           // [statistics, blocks, rows]
  long long partial_stride; // blocks * rows
  int rows, rows_stride;    // the partials' and per-row arrays' pitch
  int vocab_begin, vocab_end;
  int k_steps, row_pairs, vocab_tiles;
  float cap;
};

constexpr int TILE_K = STEP_BYTES / 2;  // bf16
constexpr int STAGED_BYTES = MODE ? 4 * BOX_BYTES : 0;  // two boxes for each multiplying warpgroup
constexpr int BARRIERS_AT = STAGES * STAGE_BYTES + STAGED_BYTES;
constexpr float EXCLUDED = -1e30f, LOWEST_SHIFT = -1e29f;

// ---- the epilogue's arithmetic

// Absolute error 1e-7, which is what float32 logits have.
__device__ __forceinline__ float tanh_fast(float a) {
  const float decay = exp2_fast(__fmul_rn(-2.8853900817779268f, fabsf(a)));
  return copysignf(__fdividef(__fsub_rn(1.0f, decay), __fadd_rn(1.0f, decay)), a);
}

// The same in all four lanes that hold a row, whichever of them asks: max and + commute.
__device__ __forceinline__ float row_max(float a) {
  a = fmaxf(a, __shfl_xor_sync(~0u, a, 1));
  return fmaxf(a, __shfl_xor_sync(~0u, a, 2));
}

__device__ __forceinline__ float row_sum(float a) {
  a = __fadd_rn(a, __shfl_xor_sync(~0u, a, 1));
  return __fadd_rn(a, __shfl_xor_sync(~0u, a, 2));
}

// d becomes t. `column` is the vocabulary entry of d[0].
__device__ __forceinline__ void transform(float (&d)[128], const Arguments& args, int column,
                                          const float (&scale)[2]) {
#pragma unroll
  for (int j = 0; j < 32; ++j) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int v = column + 8 * j + i;
      const float bias = BIAS && v < args.vocab_end ? __ldg(args.bias + v) : 0.0f;
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        float& t = d[4 * j + 2 * h + i];
        if (BIAS) t = __fadd_rn(t, bias);
        if (CAP) t = tanh_fast(__fmul_rn(t, args.cap));
        t = __fmul_rn(t, scale[h]);
        // A banned token (-inf) adds 0 and not 0 * inf; fmaxf would make one of a NaN, too.
        if (BIAS) t = t < EXCLUDED ? EXCLUDED : t;
      }
    }
  }
}

// Derivative of the softcap by its argument, from t = scale * tanh.
__device__ __forceinline__ float cap_slope(float t, float inverse_scale) {
  const float capped = t * inverse_scale;
  return 1.0f - capped * capped;
}

// Takes the target's entry of row h out of d, if this block has it, and writes it down.
__device__ __forceinline__ void take_target(float (&d)[128], int h, int at, int row,
                                            const Arguments& args) {
  // `at`: the target's column relative to this lane's first; the row's four lanes agree on `has`.
  const int lane_column = 2 * (threadIdx.x % 4);
  const bool has = at + lane_column >= 0 && at + lane_column < TILE_N;
  if (!__any_sync(~0u, has)) return;
  float t_target = EXCLUDED;
  bool mine = false;
#pragma unroll
  for (int j = 0; j < 32; ++j) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      float& t = d[4 * j + 2 * h + i];
      if (has && at == 8 * j + i) {
        t_target = t;
        mine = true;
        t = EXCLUDED;
      }
    }
  }
  const float in_row = row_max(t_target);
  float beaten = 0.0f;
#pragma unroll
  for (int j = 0; j < 32; ++j) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      if (8 * j + i < at && d[4 * j + 2 * h + i] >= in_row) beaten = 1.0f;
    }
  }
  beaten = row_max(beaten);
  if (mine && row < args.rows) {
    args.target_info[row] = t_target;
    args.target_info[args.rows_stride + row] = beaten;
  }
}

// Statistics of d (t, target taken out) for row h; in MODE 1 d becomes the stored exponentials.
__device__ __forceinline__ void reduce_row(float (&d)[128], int h, int row, int block, float mean,
                                           float shift, float inverse_scale,
                                           const Arguments& args) {
  float largest = EXCLUDED;
#pragma unroll
  for (int j = 0; j < 32; ++j) {
    largest = fmaxf(largest, fmaxf(d[4 * j + 2 * h], d[4 * j + 2 * h + 1]));
  }
  largest = row_max(largest);
  const float own_shift = fmaxf(ceilf(largest), LOWEST_SHIFT);
  const float rescale = MODE == 1 ? power_of_two(own_shift - shift) : 0.0f;
  float total = 0.0f, moment = 0.0f, squares = 0.0f;
#pragma unroll
  for (int j = 0; j < 32; ++j) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      float& t = d[4 * j + 2 * h + i];
      const float below = __fsub_rn(t, own_shift);
      const float e = exp2_fast(below);
      total = __fadd_rn(total, e);
      if (MOMENTS) {
        moment = __fmaf_rn(e, below, moment);
        squares = __fmaf_rn(e, e, squares);
      }
      if (MODE == 1) {
        const float slope = CAP ? cap_slope(t, inverse_scale) : 1.0f;
        t = CAP && t == EXCLUDED ? 0.0f : e * rescale * slope;
      }
    }
  }
  total = row_sum(total);
  if (MOMENTS) moment = row_sum(moment), squares = row_sum(squares), mean = row_sum(mean);
  if (threadIdx.x % 4 == 0 && row < args.rows) {
    float* out = args.partial + (long long)block * args.rows_stride + row;
    out[0] = largest;
    out[args.partial_stride] = total;
    if (MOMENTS) {
      out[2 * args.partial_stride] = moment;
      out[3 * args.partial_stride] = squares;
      out[4 * args.partial_stride] = mean;
    }
  }
}

// d (t) becomes the gradient of the raw logits, but for the target's entry:
// p (a + b log2 p + c p) + d, times the softcap's slope.
__device__ __forceinline__ void differentiate_row(float (&d)[128], int h, int at, int row,
                                                  int block, int columns, float inverse_scale,
                                                  const Arguments& args) {
  const int pitch = args.rows_stride, safe = row < args.rows ? row : 0;
  const float log_sum = __ldg(args.gradient + safe);
  const float a = __ldg(args.gradient + pitch + safe);
  const float b = __ldg(args.gradient + 2 * pitch + safe);
  const float c = __ldg(args.gradient + 3 * pitch + safe);
  const float mean = __ldg(args.gradient + 4 * pitch + safe);
  const float at_target = __ldg(args.gradient + 5 * pitch + safe);
  const float log_p_target = WEIGHTED ? __ldg(args.gradient + 6 * pitch + safe) : 0.0f;
  float weighted = 0.0f;
#pragma unroll
  for (int j = 0; j < 32; ++j) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      float& t = d[4 * j + 2 * h + i];
      const bool is_target = at == 8 * j + i;
      const float log_p = t - log_sum, p = exp2_fast(log_p);
      const float made = is_target ? at_target : p * (a + b * log_p + c * p) + mean;
      if (WEIGHTED && 8 * j + i < columns) weighted += made * (is_target ? log_p_target : log_p);
      t = CAP ? made * cap_slope(t, inverse_scale) : made;
    }
  }
  if (WEIGHTED) {
    weighted = row_sum(weighted);
    if (threadIdx.x % 4 == 0 && row < args.rows) {
      args.partial[(long long)block * pitch + row] = weighted;
    }
  }
}

// ---- the kernel's two roles

__device__ __forceinline__ void load_tiles(const TensorMap* hidden, const TensorMap* weight,
                                           const Arguments& args, u32 shared, u32 full, u32 empty,
                                           u32 rank) {
  Ring ring;
  const int tiles = args.row_pairs * args.vocab_tiles;
  for (int tile = blockIdx.x / CLUSTER; tile < tiles; tile += gridDim.x / CLUSTER) {
    const int row = (tile % args.row_pairs * CLUSTER + rank) * TILE_M;
    const int column = args.vocab_begin + tile / args.row_pairs * TILE_N + rank * (TILE_N / CLUSTER);
    for (int k = 0; k < args.k_steps; ++k, ring.advance()) {
      load_step(hidden, weight, k * TILE_K, row, column, ring, shared, full, empty, rank);
    }
  }
}

__device__ __forceinline__ void multiply_tiles(const TensorMap* out, const Arguments& args,
                                               u32 shared, u32 full, u32 empty, u32 rank,
                                               int warpgroup) {
  float d[128];
  Ring ring;
  const int thread = threadIdx.x % 128, lane_column = 2 * (thread % 4);
  const u32 staged = shared + STAGES * STAGE_BYTES + warpgroup * 2 * BOX_BYTES;
  const int tiles = args.row_pairs * args.vocab_tiles;
  for (int tile = blockIdx.x / CLUSTER; tile < tiles; tile += gridDim.x / CLUSTER) {
    const int first_row = (tile % args.row_pairs * CLUSTER + rank) * TILE_M + 64 * warpgroup;
    const int in_chunk = tile / args.row_pairs * TILE_N;
    const int first_column = args.vocab_begin + in_chunk, columns = args.vocab_end - first_column;
    const int block = first_column / TILE_N, row = first_row + 16 * (thread / 32) + thread % 32 / 4;
    int at[2];
    float scale[2], inverse_scale[2], shift[2];
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int safe = row + 8 * h < args.rows ? row + 8 * h : 0;
      at[h] = static_cast<int>(__ldg(args.target + safe)) - first_column - lane_column;
      scale[h] = __ldg(args.row_scale + safe);
      inverse_scale[h] = CAP ? 1.0f / scale[h] : 0.0f;
      shift[h] = MODE == 1 ? __ldg(args.shift + safe) : 0.0f;
    }
    accumulate_tile<multiply_bf16>(d, args.k_steps, ring, shared, full, empty, warpgroup);
    transform(d, args, first_column + lane_column, scale);
    const bool edge = columns < TILE_N;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      if (MODE == 2) {
        differentiate_row(d, h, at[h], row + 8 * h, block, columns - lane_column,
                          inverse_scale[h], args);
        continue;
      }
      float mean = 0.0f;
      if (MOMENTS) {
#pragma unroll
        for (int j = 0; j < 32; ++j) {
          mean = __fadd_rn(mean, __fadd_rn(d[4 * j + 2 * h], d[4 * j + 2 * h + 1]));
        }
      }
      if (edge) {
#pragma unroll
        for (int j = 0; j < 32; ++j) {
#pragma unroll
          for (int i = 0; i < 2; ++i) {
            if (8 * j + i >= columns - lane_column) d[4 * j + 2 * h + i] = EXCLUDED;
          }
        }
      }
      take_target(d, h, at[h], row + 8 * h, args);
      reduce_row(d, h, row + 8 * h, block, mean, shift[h], inverse_scale[h], args);
    }
    if (MODE) store_tile(d, staged, warpgroup, out, in_chunk, first_row);
  }
  if (MODE && thread == 0) asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
}

extern "C" __global__ void __cluster_dims__(CLUSTER, 1, 1) __launch_bounds__(384, 1)
    loss_head(const __grid_constant__ TensorMap hidden, const __grid_constant__ TensorMap weight,
              const __grid_constant__ TensorMap out, const __grid_constant__ Arguments args) {
  extern __shared__ __align__(1024) char memory[];
  const u32 shared = shared_address(memory);
  const u32 full = shared + BARRIERS_AT, empty = full + 8 * STAGES;
  const u32 rank = cluster_rank();
  const int warpgroup = threadIdx.x / 128;
  begin(full, empty);
  if (warpgroup == 0) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(LOADER_REGISTERS));
    if (threadIdx.x == 0) load_tiles(&hidden, &weight, args, shared, full, empty, rank);
  } else {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(MULTIPLIER_REGISTERS));
    multiply_tiles(&out, args, shared, full, empty, rank, warpgroup - 1);
  }
  // A block that ended would not hear its neighbour's barriers and copies.
  __syncwarp();
  cluster_sync();
}
