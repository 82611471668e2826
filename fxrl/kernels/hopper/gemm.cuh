// What the GEMMs on Hopper (sm_90a) share: all but the order of their tiles and their epilogues.
//
// A cluster of two thread blocks makes a 256 x 256 tile of a product: each 128 rows, by the same 256
// columns, so that each fetches half of the columns' operand and multicasts it to both. In a block
// one warp issues the copies (TMA) into a ring of STAGES; two warpgroups multiply (wgmma) 64 x 256
// each, and while one is in its epilogue the other may go on for as long as the ring lasts.

#include "ptx.cuh"

constexpr int TILE_M = 128, TILE_N = 256, STAGES = 4, CLUSTER = 2;
constexpr int STEP_BYTES = 128;  // of each row and column: 64 values in bf16, 128 in e4m3
constexpr int A_BYTES = TILE_M * STEP_BYTES, B_BYTES = TILE_N * STEP_BYTES;
constexpr int STAGE_BYTES = A_BYTES + B_BYTES;
constexpr int BOX_BYTES = 64 * 64 * 2;  // what one TMA store takes: 64 rows of 64 entries
constexpr int LOADER_REGISTERS = 40, MULTIPLIER_REGISTERS = 232;

struct Ring {
  int stage = 0;
  u32 phase = 0;
  __device__ __forceinline__ void advance() {
    if (++stage == STAGES) stage = 0, phase ^= 1;
  }
};

// One step's part of both operands, at entry x of the rows `row` and the columns `column`.
__device__ __forceinline__ void load_step(const TensorMap* a, const TensorMap* b, int x, int row,
                                          int column, const Ring& ring, u32 shared, u32 full,
                                          u32 empty, u32 rank) {
  barrier_wait(empty + 8 * ring.stage, ring.phase ^ 1);
  const u32 to = shared + ring.stage * STAGE_BYTES, loaded = full + 8 * ring.stage;
  barrier_expect(loaded, STAGE_BYTES);
  load_tile(to, a, x, row, loaded);
  load_tile_to_all<CLUSTER>(to + A_BYTES + rank * (B_BYTES / CLUSTER), b, x, column, loaded);
}

// d = the product of k_steps steps, of which this warpgroup has 64 rows; `added` to what d was.
template <void (*MULTIPLY)(float (&)[128], u64, u64, int)>
__device__ __forceinline__ void accumulate_tile(float (&d)[128], int k_steps, Ring& ring,
                                                u32 shared, u32 full, u32 empty, int warpgroup,
                                                bool added = false) {
  const bool signals = threadIdx.x % 128 < CLUSTER;
  const u32 to = threadIdx.x % 128;
  int before = 0;
  for (int k = 0; k < k_steps; ++k, ring.advance()) {
    barrier_wait(full + 8 * ring.stage, ring.phase);
    const u32 stage = shared + ring.stage * STAGE_BYTES;
    const u64 a = tile_descriptor(stage + warpgroup * (A_BYTES / 2));
    const u64 b = tile_descriptor(stage + A_BYTES);
    multiply_begin();
#pragma unroll
    for (int part = 0; part < STEP_BYTES / 32; ++part) {
      MULTIPLY(d, a + 2 * part, b + 2 * part, added || k > 0 || part > 0);
    }
    multiply_commit();
    if (k > 0) {
      multiply_wait<1>();
      if (signals) barrier_arrive(empty + 8 * before, to);
    }
    before = ring.stage;
  }
  multiply_wait<0>();
  // The wait does not name the accumulators: nothing may be computed of them before it.
#pragma unroll
  for (int i = 0; i < 128; ++i) asm volatile("" : "+f"(d[i])::"memory");
  if (signals) barrier_arrive(empty + 8 * before, to);
}

// Rounds d to bf16 and stores it by way of shared memory, half of the columns at a time.
__device__ __forceinline__ void store_tile(const float (&d)[128], u32 staged, int warpgroup,
                                           const TensorMap* out, int column, int row) {
  const int thread = threadIdx.x % 128, lane = thread % 32;
  const int in_row = 16 * (thread / 32) + (lane & 15), odd = lane >> 4;
  const bool elected = thread == 0;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    if (elected) asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory");
    warpgroup_sync(warpgroup);
#pragma unroll
    for (int j = 16 * half; j < 16 * half + 16; j += 2) {
      const int chunk = (j % 8 + odd) ^ (in_row & 7);
      const u32 to = staged + (j / 8 % 2) * BOX_BYTES + in_row * 128 + chunk * 16;
      asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(to),
                   "r"(pack_bf16(d[4 * j], d[4 * j + 1])),
                   "r"(pack_bf16(d[4 * j + 2], d[4 * j + 3])),
                   "r"(pack_bf16(d[4 * j + 4], d[4 * j + 5])),
                   "r"(pack_bf16(d[4 * j + 6], d[4 * j + 7]))
                   : "memory");
    }
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
    warpgroup_sync(warpgroup);
    if (elected) {
      store_box(out, staged, column + 128 * half, row);
      store_box(out, staged + BOX_BYTES, column + 128 * half + 64, row);
      asm volatile("cp.async.bulk.commit_group;" ::: "memory");
    }
  }
}

// Barriers of a ring, before anybody waits for them.
__device__ __forceinline__ void begin(u32 full, u32 empty) {
  if (threadIdx.x == 0) {
    for (int stage = 0; stage < STAGES; ++stage) {
      barrier_init(full + 8 * stage, 1);
      barrier_init(empty + 8 * stage, 2 * CLUSTER);  // both multiplying warpgroups of each block
    }
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }
  __syncthreads();
  cluster_sync();
}
