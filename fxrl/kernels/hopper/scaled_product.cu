// A product in FP8 with a product of low rank added on Hopper (sm_90a), rounded to bf16 once:
//
//   out [M, N] = row_scale [M] * column_scale [N] * (a [M, K] b [N, K]^T) + left [M, R] right [N, R]^T
//
// a and b are e4m3, left and right bf16, scales float32. A compile-time constant: COLUMNS (0: no scale
// of columns).
//
// NOTE [Why the low rank is added here]
// It is one more step of a product that has 32 or more, multiplied by bf16's instructions into the
// accumulators once these have their scale. By itself it writes a value as wide as the layer, which
// somebody reads again: 800 MB for 16384 x 12288, as much as the FP8 product moves in all.

#include "gemm.cuh"

struct Arguments {
  const float* row_scale;     // [rows]
  const float* column_scale;  // [columns], COLUMNS
  int rows, columns;
  int k_steps, rank;
  int row_pairs, column_tiles;
};

constexpr int DEPTH = STEP_BYTES, RANK_DEPTH = STEP_BYTES / 2;  // entries of a step
constexpr int BARRIERS_AT = STAGES * STAGE_BYTES + 4 * BOX_BYTES;
constexpr int GROUP = 8;  // pairs of blocks of rows; as many columns run beside them: the L2 holds both

struct Tile {
  int row_pair, column;
  __device__ __forceinline__ Tile(int tile, const Arguments& args) {
    const int group = tile / (GROUP * args.column_tiles), at = tile % (GROUP * args.column_tiles);
    const int pairs = min(GROUP, args.row_pairs - group * GROUP);
    row_pair = group * GROUP + at % pairs;
    column = at / pairs * TILE_N;
  }
};

__device__ __forceinline__ void load_tiles(const TensorMap* a, const TensorMap* b,
                                           const TensorMap* left, const TensorMap* right,
                                           const Arguments& args, u32 shared, u32 full, u32 empty,
                                           u32 rank) {
  Ring ring;
  const int tiles = args.row_pairs * args.column_tiles;
  for (int at = blockIdx.x / CLUSTER; at < tiles; at += gridDim.x / CLUSTER) {
    const Tile tile(at, args);
    const int row = (tile.row_pair * CLUSTER + rank) * TILE_M;
    const int column = tile.column + rank * (TILE_N / CLUSTER);
    for (int k = 0; k < args.k_steps; ++k, ring.advance()) {
      load_step(a, b, k * DEPTH, row, column, ring, shared, full, empty, rank);
    }
    for (int x = 0; x < args.rank; x += RANK_DEPTH, ring.advance()) {
      load_step(left, right, x, row, column, ring, shared, full, empty, rank);
    }
  }
}

// The scales of this lane's columns of a tile; `column` is the first of them. Fetched before the
// product, whose steps hide the wait.
__device__ __forceinline__ void load_scales(float2 (&scale)[32], const Arguments& args, int column) {
#pragma unroll
  for (int j = 0; j < 32; ++j) {
    const bool inside = column + 8 * j < args.columns;  // columns are a multiple of 8
    const float2* from = reinterpret_cast<const float2*>(args.column_scale + column + 8 * j);
    scale[j] = inside ? __ldg(from) : make_float2(0.0f, 0.0f);
  }
}

__device__ __forceinline__ void scale_tile(float (&d)[128], const float2 (&scale)[32],
                                           const float (&row_scale)[2]) {
#pragma unroll
  for (int j = 0; j < 32; ++j) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      d[4 * j + 2 * h] *= COLUMNS ? row_scale[h] * scale[j].x : row_scale[h];
      d[4 * j + 2 * h + 1] *= COLUMNS ? row_scale[h] * scale[j].y : row_scale[h];
    }
  }
}

__device__ __forceinline__ void multiply_tiles(const TensorMap* out, const Arguments& args,
                                               u32 shared, u32 full, u32 empty, u32 rank,
                                               int warpgroup) {
  float d[128];
  Ring ring;
  const int thread = threadIdx.x % 128;
  const u32 staged = shared + STAGES * STAGE_BYTES + warpgroup * 2 * BOX_BYTES;
  const int tiles = args.row_pairs * args.column_tiles;
  for (int at = blockIdx.x / CLUSTER; at < tiles; at += gridDim.x / CLUSTER) {
    const Tile tile(at, args);
    const int first_row = (tile.row_pair * CLUSTER + rank) * TILE_M + 64 * warpgroup;
    const int row = first_row + 16 * (thread / 32) + thread % 32 / 4;
    float row_scale[2];
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      row_scale[h] = row + 8 * h < args.rows ? __ldg(args.row_scale + row + 8 * h) : 0.0f;
    }
    float2 column_scale[32];
    if (COLUMNS) load_scales(column_scale, args, tile.column + 2 * (thread % 4));
    accumulate_tile<multiply_e4m3>(d, args.k_steps, ring, shared, full, empty, warpgroup);
    scale_tile(d, column_scale, row_scale);
    const int steps = (args.rank + RANK_DEPTH - 1) / RANK_DEPTH;
    accumulate_tile<multiply_bf16>(d, steps, ring, shared, full, empty, warpgroup, true);
    store_tile(d, staged, warpgroup, out, tile.column, first_row);
  }
  if (thread == 0) asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
}

extern "C" __global__ void __cluster_dims__(CLUSTER, 1, 1) __launch_bounds__(384, 1)
    scaled_product(const __grid_constant__ TensorMap a, const __grid_constant__ TensorMap b,
                   const __grid_constant__ TensorMap left, const __grid_constant__ TensorMap right,
                   const __grid_constant__ TensorMap out, const __grid_constant__ Arguments args) {
  extern __shared__ __align__(1024) char memory[];
  const u32 shared = shared_address(memory);
  const u32 full = shared + BARRIERS_AT, empty = full + 8 * STAGES;
  const u32 rank = cluster_rank();
  const int warpgroup = threadIdx.x / 128;
  begin(full, empty);
  if (warpgroup == 0) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(LOADER_REGISTERS));
    if (threadIdx.x == 0) load_tiles(&a, &b, &left, &right, args, shared, full, empty, rank);
  } else {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(MULTIPLIER_REGISTERS));
    multiply_tiles(&out, args, shared, full, empty, rank, warpgroup - 1);
  }
  // A block that ended would not hear its neighbour's barriers and copies.
  __syncwarp();
  cluster_sync();
}
