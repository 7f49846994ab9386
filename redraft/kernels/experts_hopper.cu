// Routed experts with 4-bit weights on Hopper: one grouped product, D[rows of one expert, M] = x @ W^T, in FP8 tensor
// cores without FP8 accuracy. See experts_hopper.py for the idea, the layouts and what the host passes.
//
// Weights are the A operand of wgmma, unpacked in registers; token rows are the B operand in shared memory. One
// warpgroup produces: bulk copies stream weights, cp.async gathers token rows. WGS warpgroups consume, each 128 weight
// rows of the same token rows. Blocks are persistent over items (a tile of up to 32 token rows, WGS row tiles).
//
// Macros set by the host: K (input width), KB (quantisation group), TILES (row tiles of 128 an expert), GATED (1: rows
// are gate/up pairs), STAGES, WGS, PRODUCER_REGS, CONSUMER_REGS.
typedef unsigned int u32;
typedef unsigned long long u64;
typedef unsigned short u16;
typedef unsigned char u8;

#define NMAX 32                              // token rows of a tile
#define GROUPS (K / KB)                      // a stage is one group
#define MG ((TILES + WGS - 1) / WGS)         // items of a token tile
#define W_BYTES (64 * KB)                    // words of a row tile
#define SZ_BYTES 512                         // its scales and zeros
#define OFF_WORDS 0                          // in a stage
#define OFF_SZ (WGS * W_BYTES)
#define OFF_X (OFF_SZ + WGS * SZ_BYTES)
#define STAGE_BYTES (OFF_X + NMAX * KB * 2)  // rows have high and low parts
// What a group adds per token row: its sum, and in the second product its scale. The first has one scale a row.
#define STATS (GATED ? 1 : 2)
#define STATS_BYTES ((GROUPS * STATS + GATED) * NMAX * 4)
#define TCOLS (GATED ? 64 : 128)             // output columns of a row tile
#define TPITCH (TCOLS * 2 + 16)
#define T_BYTES (NMAX * TPITCH)
#define OFF_STATS (STAGES * STAGE_BYTES)
#define OFF_T (OFF_STATS + 2 * STATS_BYTES)
#define OFF_BAR (OFF_T + WGS * T_BYTES)
#define PITCH (KB / 2)                       // bytes of a row of words
#define FLIP_SHIFT (KB == 128 ? 1 : 2)       // rows that share a swizzle: 128 bytes of them

__device__ __forceinline__ u32 smem_addr(const void* p) { return (u32)__cvta_generic_to_shared(p); }

__device__ __forceinline__ void bar_init(u32 bar, u32 count) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(bar), "r"(count) : "memory");
}
__device__ __forceinline__ void bar_wait(u32 bar, u32 parity) {
    asm volatile(
        "{ .reg .pred p; W: mbarrier.try_wait.parity.shared::cta.b64 p, [%0], %1; @p bra D; bra W; D: }" ::"r"(bar),
        "r"(parity)
        : "memory");
}
__device__ __forceinline__ void bar_arrive(u32 bar) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(bar) : "memory");
}
__device__ __forceinline__ void bar_expect(u32 bar, u32 bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(bar), "r"(bytes) : "memory");
}
__device__ __forceinline__ void bulk_load(u32 dst, const void* src, u32 bytes, u32 bar) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(dst),
                 "l"(src), "r"(bytes), "r"(bar)
                 : "memory");
}
__device__ __forceinline__ void copy16(u32 dst, const void* src) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(dst), "l"(src) : "memory");
}
__device__ __forceinline__ void copy4(u32 dst, const void* src) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(dst), "l"(src) : "memory");
}
// Arrives on the barrier once this thread's earlier cp.async copies have landed.
__device__ __forceinline__ void copies_arrive(u32 bar) {
    asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(bar) : "memory");
}
__device__ __forceinline__ void sync_warpgroup(int wg) { asm volatile("bar.sync %0, 128;" ::"r"(wg + 1) : "memory"); }

__device__ __forceinline__ void load_matrices(u32 (&r)[4], u32 addr) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(addr));
}
__device__ __forceinline__ void store_transposed(u32 addr, u32 value) {
    asm volatile("stmatrix.sync.aligned.m8n8.x1.trans.shared.b16 [%0], {%1};" ::"r"(addr), "r"(value) : "memory");
}

// d (+)= A[64, 32] B[32, 16 * N8] in e4m3: 8 * N8 accumulators a thread, token columns n8 of high, then of low parts.
template <int N8>
struct Mma;
#define D8(i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3]), "+f"(d[i + 4]), "+f"(d[i + 5]), \
              "+f"(d[i + 6]), "+f"(d[i + 7])
#define MMA(N8, SHAPE, OUTS, A, DESC, KEEP, ...)                                                                    \
    template <>                                                                                                    \
    struct Mma<N8> {                                                                                               \
        static __device__ __forceinline__ void run(float* d, const u32* a, u64 desc, int keep) {                   \
            asm volatile("{ .reg .pred p; setp.ne.b32 p, " KEEP ", 0; wgmma.mma_async.sync.aligned." SHAPE         \
                         ".f32.e4m3.e4m3 {" OUTS "}, {" A "}, " DESC ", p, 1, 1; }"                                \
                         : __VA_ARGS__                                                                             \
                         : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(desc), "r"(keep));                      \
        }                                                                                                          \
    };
#define O8 "%0,%1,%2,%3,%4,%5,%6,%7"
#define O16 O8 ",%8,%9,%10,%11,%12,%13,%14,%15"
#define O24 O16 ",%16,%17,%18,%19,%20,%21,%22,%23"
#define O32 O24 ",%24,%25,%26,%27,%28,%29,%30,%31"
MMA(1, "m64n16k32", O8, "%8,%9,%10,%11", "%12", "%13", D8(0))
MMA(2, "m64n32k32", O16, "%16,%17,%18,%19", "%20", "%21", D8(0), D8(8))
MMA(3, "m64n48k32", O24, "%24,%25,%26,%27", "%28", "%29", D8(0), D8(8), D8(16))
MMA(4, "m64n64k32", O32, "%32,%33,%34,%35", "%36", "%37", D8(0), D8(8), D8(16), D8(24))

__device__ __forceinline__ float half_bits(u32 h) {
    float f;
    asm("{ .reg .b16 l; cvt.u16.u32 l, %1; cvt.f32.f16 %0, l; }" : "=f"(f) : "r"(h));
    return f;
}
__device__ __forceinline__ u32 pack_bf16(float low, float high) {
    u32 r;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(high), "f"(low));
    return r;
}
__device__ __forceinline__ float gelu_tanh(float x) {
    float u = 1.5957691216057308f * x * (1.0f + 0.044715f * x * x);  // 2 * sqrt(2/pi) * (x + 0.044715 x^3)
    return x - x * __fdividef(1.0f, 1.0f + __expf(u));
}

__device__ __forceinline__ float low_half(u32 pair) { return __uint_as_float(pair << 16); }
__device__ __forceinline__ float high_half(u32 pair) { return __uint_as_float(pair & 0xffff0000u); }

// 16 BF16 values of a row, as two runs of 8, that lie in one piece of split rows.
struct Piece {
    u32 even[4], odd[4];
    __device__ __forceinline__ Piece(uint4 e, uint4 o) : even{e.x, e.y, e.z, e.w}, odd{o.x, o.y, o.z, o.w} {}
    __device__ __forceinline__ float top() const {
        float top = 0.f;
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            top = fmaxf(top, fmaxf(fabsf(low_half(even[i])), fabsf(high_half(even[i]))));
            top = fmaxf(top, fmaxf(fabsf(low_half(odd[i])), fabsf(high_half(odd[i]))));
        }
        return top;
    }
    __device__ __forceinline__ float sum() const {
        float sum = 0.f;
#pragma unroll
        for (int i = 0; i < 4; ++i)
            sum += (low_half(even[i]) + high_half(even[i])) + (low_half(odd[i]) + high_half(odd[i]));
        return sum;
    }
    // High and low parts of value * scale.
    __device__ __forceinline__ void split(float scale, uint4& high, uint4& low) const {
        u32 h[4], l[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            float v[4] = {low_half(even[i]) * scale, low_half(odd[i]) * scale, high_half(even[i]) * scale,
                          high_half(odd[i]) * scale};
            u16 pair[2], rest[2];
#pragma unroll
            for (int j = 0; j < 2; ++j) {
                u32 back;
                asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(pair[j]) : "f"(v[2 * j + 1]), "f"(v[2 * j]));
                asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(back) : "h"(pair[j]));
                float a = (v[2 * j] - half_bits(back & 0xffff)) * 16.f;
                float b = (v[2 * j + 1] - half_bits(back >> 16)) * 16.f;
                asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(rest[j]) : "f"(b), "f"(a));
            }
            h[i] = pair[0] | (u32)pair[1] << 16;
            l[i] = rest[0] | (u32)rest[1] << 16;
        }
        high = make_uint4(h[0], h[1], h[2], h[3]);
        low = make_uint4(l[0], l[1], l[2], l[3]);
    }
};

// The exponent field of a power of two that puts `top` between 128 and 256; e4m3 ends at 448.
__device__ __forceinline__ int scale_exponent(float top) {
    return max(9, min(254, 261 - (int)(__float_as_uint(top) >> 23)));
}
__device__ __forceinline__ float power(int exponent) { return __uint_as_float((u32)exponent << 23); }
// 512 / power(exponent): weights come as q * 2^-9.
__device__ __forceinline__ float unscale(int exponent) { return power(263 - exponent); }

struct Item {
    int expert, row0, end, mgroup;
    __device__ __forceinline__ int count() const { return end - row0; }
};

// Tiles follow each other in slot order, so a tile ends where the next one starts. expert -1: no such item. The row
// groups of a tile rotate from round to round: the last one may be smaller, and SMs should share those.
__device__ __forceinline__ Item get_item(int item, const int* tile_e, const int* tile_r, int max_tiles, int slots) {
    int t = item / MG;
    Item out;
    out.expert = t < max_tiles ? tile_e[t] : -1;
    out.row0 = t < max_tiles ? tile_r[t] : 0;
    out.end = t + 1 < max_tiles ? tile_r[t + 1] : slots;
    out.mgroup = (item + t / max(1, (int)gridDim.x / MG)) % MG;
    return out;
}

// A matrix of token rows in shared memory for wgmma: 8 rows x 16 bytes lie together, 128 bytes from one to the next.
__device__ __forceinline__ u64 descriptor(u32 low) {
    return (u64)((KB / 16 * 128) >> 4) << 32 | low;  // the upper half is a constant, and need not move between registers
}

// Unpack a warpgroup's 64 rows of one group and start their product. a: KB / 32 steps of 4 registers.
template <int N8>
__device__ __forceinline__ void start_product(float (&d)[8 * N8], u32 (&a)[KB / 32][4], u32 words, u32 rows) {
#pragma unroll
    for (int s = 0; s < KB / 64; ++s) {
        u32 r[4];
        load_matrices(r, words ^ (s * 32));
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            a[2 * s][i] = r[i] & 0x0f0f0f0fu;
            a[2 * s + 1][i] = (r[i] >> 4) & 0x0f0f0f0fu;
        }
    }
    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#pragma unroll
    for (int t = 0; t < KB / 32; ++t) Mma<N8>::run(d, a[t], descriptor(rows + t * 16), t > 0);
    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}

// acc += s * (scale * (high + low / 16) - zero * sum), see experts_hopper.py; where the scale is the row's it waits.
template <int N8>
__device__ __forceinline__ void add_group(float (&acc)[16], float (&d)[8 * N8], const float (&s)[2], const float (&z)[2],
                                          const float (&stats)[N8][2 * STATS]) {
#pragma unroll
    for (int i = 0; i < 8 * N8; ++i) asm volatile("" : "+f"(d[i])::"memory");
#pragma unroll
    for (int n = 0; n < N8; ++n)
#pragma unroll
        for (int half = 0; half < 2; ++half)
#pragma unroll
            for (int c = 0; c < 2; ++c) {
                float* o = &acc[n * 4 + half * 2 + c];
                float t = fmaf(d[n * 8 + half * 2 + c + 4], 0.0625f, d[n * 8 + half * 2 + c]);
                if (!GATED) t *= stats[n][2 * c + 1];
                *o = fmaf(z[half], stats[n][c * STATS], fmaf(s[half], t, *o));
            }
}

// One item's main loop for one warpgroup. acc[mb][n8 * 4 + r]: r 0,1 row g, r 2,3 row g + 8; columns 2c, 2c + 1.
template <int N8>
__device__ __forceinline__ void consume(float (&acc)[2][16], char* smem, u32 full, u32 empty, int wg, int tid,
                                        int buffer, u32& stage, u32& phase) {
    int lane = tid & 31, warp = tid >> 5;
#pragma unroll
    for (int mb = 0; mb < 2; ++mb)
#pragma unroll
        for (int i = 0; i < 4 * N8; ++i) acc[mb][i] = 0.f;
    const float* group_stats = (const float*)(smem + OFF_STATS + buffer * STATS_BYTES) + (lane & 3) * 2 * STATS;
    int row = warp * 16 + (lane & 15), flip = (row >> FLIP_SHIFT) & (KB / 32 - 1);
    u32 word_off = OFF_WORDS + wg * W_BYTES + row * PITCH + (((lane >> 4) ^ flip) << 4);
    int scale_off = OFF_SZ + wg * SZ_BYTES + (warp * 16 + (lane >> 2)) * 4;
#pragma unroll 1
    for (int kb = 0; kb < GROUPS; ++kb, group_stats += NMAX * STATS) {
        bar_wait(full + 8 * stage, phase);
        asm volatile("fence.proxy.async.shared::cta;" ::: "memory");  // cp.async wrote what wgmma is going to read
        const char* base = smem + stage * STAGE_BYTES;
        u32 words = smem_addr(base) + word_off;
        u32 rows = (smem_addr(base) + OFF_X) >> 4 | (128 >> 4) << 16;
        float d0[8 * N8], d1[8 * N8];
        u32 a0[KB / 32][4], a1[KB / 32][4];
        start_product<N8>(d0, a0, words, rows);
        start_product<N8>(d1, a1, words + 64 * PITCH, rows);
        float s[2][2], z[2][2], stats[N8][2 * STATS];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            u32 pair = *(const u32*)(base + scale_off + (i >> 1) * 256 + (i & 1) * 32);
            s[i >> 1][i & 1] = half_bits(pair & 0xffff);
            z[i >> 1][i & 1] = -s[i >> 1][i & 1] * half_bits(pair >> 16);
        }
#pragma unroll
        for (int n = 0; n < N8; ++n) {
            if (GATED) *(float2*)stats[n] = *(const float2*)(group_stats + n * 8);
            else *(float4*)stats[n] = *(const float4*)(group_stats + n * 16);
        }
        asm volatile("wgmma.wait_group.sync.aligned 1;" ::: "memory");
        add_group<N8>(acc[0], d0, s[0], z[0], stats);
        asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
        if (lane == 0) bar_arrive(empty + 8 * stage);
        add_group<N8>(acc[1], d1, s[1], z[1], stats);
        if (++stage == STAGES) stage = 0, phase ^= 1;
    }
    if (GATED)
#pragma unroll
        for (int n = 0; n < N8; ++n) {
            float2 scale = *(const float2*)(group_stats + n * 8);  // behind the groups
#pragma unroll
            for (int i = 0; i < 8; ++i) acc[i >> 2][n * 4 + (i & 3)] *= i & 1 ? scale.y : scale.x;
        }
}

// Transposes the accumulators to token rows through shared memory and writes them out: BF16 rows, or with GATED the
// activations split for the next product, with their stats.
template <int N8>
__device__ __forceinline__ void write_out(float (&acc)[2][16], char* smem, int wg, int tid, int tile, const Item& item,
                                          u8* out, float2* out_stats) {
    int lane = tid & 31, warp = tid >> 5;
    char* t = smem + OFF_T + wg * T_BYTES;
    u32 row_addr = smem_addr(t) + (lane & 7) * TPITCH;
    sync_warpgroup(wg);  // the last item's rows have left
#pragma unroll
    for (int mb = 0; mb < 2; ++mb)
#pragma unroll
        for (int n = 0; n < N8; ++n) {
            float* v = &acc[mb][n * 4];
            u32 at = row_addr + n * 8 * TPITCH;
            if (GATED) {
                u32 h = pack_bf16(gelu_tanh(v[0]) * v[2], gelu_tanh(v[1]) * v[3]);
                store_transposed(at + (mb * 32 + warp * 8) * 2, h);
            } else {
                store_transposed(at + (mb * 64 + warp * 16) * 2, pack_bf16(v[0], v[1]));
                store_transposed(at + (mb * 64 + warp * 16 + 8) * 2, pack_bf16(v[2], v[3]));
            }
        }
    sync_warpgroup(wg);
    if (GATED) {  // 64 columns are one group of the next product; 4 threads a row
        int row = tid >> 2, q = tid & 3;
        const uint4* p = (const uint4*)(t + row * TPITCH) + (q >> 1) * 2 + (q & 1);
        Piece piece(p[0], p[4]);
        float top = piece.top(), sum = piece.sum();
#pragma unroll
        for (int step = 1; step < 4; step *= 2) {
            top = fmaxf(top, __shfl_xor_sync(0xffffffffu, top, step));
            sum += __shfl_xor_sync(0xffffffffu, sum, step);
        }
        if (row < item.count()) {
            int exponent = scale_exponent(top);
            uint4 high, low;
            piece.split(power(exponent), high, low);
            u64 group = (u64)(item.row0 + row) * TILES + tile;
            uint4* target = (uint4*)(out + group * 128) + q;
            target[0] = high;
            target[4] = low;
            if (q == 0) out_stats[group] = make_float2(sum, unscale(exponent));
        }
    } else {
        const int chunks = TCOLS / 8;
        for (int i = tid; i < item.count() * chunks; i += 128) {
            int row = i / chunks, chunk = i % chunks;
            ((uint4*)(out + ((u64)(item.row0 + row) * TILES + tile) * TCOLS * 2))[chunk] =
                ((const uint4*)(t + row * TPITCH))[chunk];
        }
    }
}

// The producing warpgroup: thread 0 streams an item's weights, and all gather its token rows and what groups add to them.
__device__ __forceinline__ void produce(Item item, char* smem, u32 full, u32 empty, int p, const u8* x,
                                        const float* x_stats, const float* x_scale, const u8* words, const u8* scales,
                                        const int* rows, const int* tile_e, const int* tile_r, int max_tiles, int slots) {
    const int per_row = KB / 8, step = 128 / per_row, turns = NMAX / step;  // 16-byte pieces of a token row
    const int first = p / per_row, piece = p % per_row;
    const u32 dst = (2 * (first >> 3) + piece / (KB / 16)) * (KB / 16 * 128) + piece % (KB / 16) * 128 + (first & 7) * 16;
    u32 stage = 0, phase = 0;
    int row[turns + 1];  // of this thread's pieces, then of its stats
    auto find_rows = [&](const Item& it) {
#pragma unroll
        for (int r = 0; r <= turns; ++r) {
            int slot = it.row0 + min(r < turns ? r * step + first : (p & 31), it.count() - 1);
            row[r] = GATED ? rows[slot] : slot;
        }
    };
    auto load_weights = [&](u64 block, int wgs, int stage) {
        u32 base = smem_addr(smem + stage * STAGE_BYTES), bar = full + 8 * stage;
        bar_expect(bar, wgs * (SZ_BYTES + W_BYTES));
        bulk_load(base + OFF_WORDS, words + block * W_BYTES, wgs * W_BYTES, bar);
        bulk_load(base + OFF_SZ, scales + block * SZ_BYTES, wgs * SZ_BYTES, bar);
    };
    int loaded = 0;  // first stages whose weights were asked for ahead of the loop
    if (!GATED) {
        if (item.expert >= 0) {
            int wgs = min(WGS, TILES - item.mgroup * WGS);
            u64 block = ((u64)item.expert * TILES + item.mgroup * WGS) * GROUPS;
            for (; loaded < STAGES; ++loaded, block += wgs)
                if (p == 0) load_weights(block, wgs, loaded);
        }
        asm volatile("griddepcontrol.wait;" ::: "memory");  // token rows come from the first product
    }
    if (item.expert >= 0) find_rows(item);
    for (int i = blockIdx.x, turn = 0; item.expert >= 0; turn ^= 1) {
        i += gridDim.x;
        Item next = get_item(i, tile_e, tile_r, max_tiles, slots);
        int wgs = min(WGS, TILES - item.mgroup * WGS), count = item.count();
        u32 offset[turns];  // of pieces in x, which is smaller than 4 GiB
#pragma unroll
        for (int r = 0; r < turns; ++r) offset[r] = row[r] * (2 * K) + piece * 16;
        int stats_row = row[turns];
        u64 block = ((u64)item.expert * TILES + item.mgroup * WGS) * GROUPS;
        for (int kb = 0; kb < GROUPS; ++kb, block += wgs) {
            bar_wait(empty + 8 * stage, phase ^ 1);
            u32 base = smem_addr(smem + stage * STAGE_BYTES), bar = full + 8 * stage;
            if (loaded > 0) --loaded;
            else if (p == 0) load_weights(block, wgs, stage);
#pragma unroll
            for (int r = 0; r < turns; ++r)
                if (r * step + first < count)
                    copy16(base + OFF_X + dst + r * (step / 8) * (KB / 8 * 128), x + offset[r] + kb * (2 * KB));
            if (kb == 0) {
                u32 target = smem_addr(smem + OFF_STATS + turn * STATS_BYTES) + (p & 31) * (4 * STATS);
                const float* stats = x_stats + (u64)stats_row * (GROUPS * STATS);
                for (int g = p >> 5; g < GROUPS; g += 4)
                    for (int j = 0; j < STATS; ++j) copy4(target + g * (NMAX * STATS * 4) + j * 4, stats + g * STATS + j);
                if (GATED && p < 32) copy4(target + GROUPS * (NMAX * 4), x_scale + stats_row);
            }
            copies_arrive(bar);
            if (++stage == STAGES) stage = 0, phase ^= 1;
            if (kb == GROUPS / 2 && next.expert >= 0) find_rows(next);
        }
        item = next;
    }
}

// x_scale: fp32 [rows of x], only in the first product.
extern "C" __global__ void __launch_bounds__((WGS + 1) * 128, 1)
    experts_product(const u8* x, const float* x_stats, const float* x_scale, const u8* words, const u8* scales, const int* rows,
                    const int* tile_e, const int* tile_r, int max_tiles, int slots, u8* out, float2* out_stats) {
    extern __shared__ __align__(1024) char smem[];
    u32 full = smem_addr(smem + OFF_BAR), empty = full + 8 * STAGES;
    int warp = threadIdx.x >> 5;
    if (threadIdx.x == 0) {
        for (int s = 0; s < STAGES; ++s) {
            bar_init(full + 8 * s, 129);  // the bytes of the bulk copies and 128 threads' gathers
            bar_init(empty + 8 * s, WGS * 4);
        }
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
    __syncthreads();
    if (GATED) asm volatile("griddepcontrol.launch_dependents;");
    Item item = get_item(blockIdx.x, tile_e, tile_r, max_tiles, slots);
    if (warp >= WGS * 4) {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(PRODUCER_REGS));
        produce(item, smem, full, empty, threadIdx.x - WGS * 128, x, x_stats, x_scale, words, scales, rows, tile_e, tile_r,
                max_tiles, slots);
        return;
    }
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(CONSUMER_REGS));
    int wg = warp >> 2, tid = threadIdx.x & 127;
    u32 stage = 0, phase = 0;
    float acc[2][16];
    for (int i = blockIdx.x, turn = 0; item.expert >= 0; turn ^= 1) {
        i += gridDim.x;
        Item next = get_item(i, tile_e, tile_r, max_tiles, slots);
        int tile = item.mgroup * WGS + wg;
        if (tile >= TILES) {  // this warpgroup has no rows here; it still frees the stages it skips
            for (int kb = 0; kb < GROUPS; ++kb) {
                bar_wait(full + 8 * stage, phase);
                if ((threadIdx.x & 31) == 0) bar_arrive(empty + 8 * stage);
                if (++stage == STAGES) stage = 0, phase ^= 1;
            }
            item = next;
            continue;
        }
        int n8 = (item.count() + 7) >> 3;
#define RUN(N)                                                           \
    consume<N>(acc, smem, full, empty, wg, tid, turn, stage, phase);     \
    write_out<N>(acc, smem, wg, tid, tile, item, out, out_stats);
        if (n8 <= 1) {
            RUN(1)
        } else if (n8 == 2) {
            RUN(2)
        } else if (n8 == 3) {
            RUN(3)
        } else {
            RUN(4)
        }
        item = next;
    }
}

// x BF16 [count, K] into high and low parts [count, GROUPS, 2, KB], sums [count, GROUPS] in scaled units, and scales
// [count]. A warp a row.
extern "C" __global__ void __launch_bounds__(128)
    split_rows(const u8* x, u8* out, float* out_sums, float* out_scales, int count) {
    const int per_group = KB / 16, pieces = K / 16, turns = (pieces + 31) / 32;
    int row = blockIdx.x * 4 + (threadIdx.x >> 5), lane = threadIdx.x & 31;
    if (row >= count) return;
    // Piece q of a group holds nibbles j and j + 2 (a quarter of the group each) of 8 columns.
    auto load = [&](int i) {
        int q = i % per_group, j = (q >> 1) & 1, column = (q >> 2) * 16 + (q & 1) * 8;
        const u8* group = x + ((u64)row * GROUPS + i / per_group) * (KB * 2);
        const uint4* p = (const uint4*)(group + (j * (KB / 4) + column) * 2);
        return Piece(p[0], p[KB / 16]);
    };
    float top = 0.f;
#pragma unroll
    for (int turn = 0; turn < turns; ++turn)
        if (turn * 32 + lane < pieces) top = fmaxf(top, load(turn * 32 + lane).top());
#pragma unroll
    for (int step = 1; step < 32; step *= 2) top = fmaxf(top, __shfl_xor_sync(0xffffffffu, top, step));
    int exponent = scale_exponent(top);
    if (lane == 0) out_scales[row] = unscale(exponent);
#pragma unroll
    for (int turn = 0; turn < turns; ++turn) {
        int i = turn * 32 + lane;
        bool real = i < pieces;
        Piece piece = load(real ? i : 0);
        float sum = piece.sum();
        for (int step = 1; step < per_group; step *= 2) sum += __shfl_xor_sync(0xffffffffu, sum, step);
        if (!real) continue;
        uint4 high, low;
        piece.split(power(exponent), high, low);
        u64 group = (u64)row * GROUPS + i / per_group;
        uint4* target = (uint4*)(out + group * (2 * KB)) + i % per_group;
        target[0] = high;
        target[per_group] = low;
        if (i % per_group == 0) out_sums[group] = sum * (power(exponent) * 0.001953125f);  // in units of 512 / scale
    }
}
