// Routed experts with 4-bit weights on Hopper: both grouped products of a layer, D[rows of one expert, M] = x @ W^T, in
// one launch, in FP8 tensor cores without FP8 accuracy. See experts_hopper.py for the idea, the layouts and what the host
// passes.
//
// Weights are the A operand of wgmma, unpacked in registers; token rows are the B operand in shared memory. One
// warpgroup produces: bulk copies stream weights, cp.async gathers token rows. WGS warpgroups consume, each 128 weight
// rows of the same token rows. An item is a tile of up to NMAX token rows times WGS row tiles of one product. Blocks take
// the next item from a counter, first all of the first product, then those of the second: a block that is done early
// goes on, and waits only for the rows it needs. Which block computes an item changes nothing in its result.
//
// Macros set by the host: HIDDEN, WIDTH (of an expert), GROUP_UP and GROUP_DOWN (quantisation groups), READ_TILES (of the
// layout), NMAX (32 or 64), NOUT (of these, written out at a time), STAGES_UP and STAGES_DOWN, WGS, PRODUCER_REGS,
// CONSUMER_REGS; ONLY_SPLIT leaves the products out.
typedef unsigned int u32;
typedef unsigned long long u64;
typedef unsigned short u16;
typedef unsigned char u8;

#define ITEMS 4  // announced to the consumers at a time; the producers are at most two ahead

__host__ __device__ constexpr int larger(int a, int b) { return a > b ? a : b; }

// A product over weights [128 * tiles, k]; gated: rows are gate/up pairs, and the output is split for the next product.
template <int k, int group, int tiles, bool gated, int stages>
struct Product {
    static constexpr int K = k, KB = group, TILES = tiles, STAGES = stages;
    static constexpr bool GATED = gated;
    static constexpr int GROUPS = K / KB;                    // a stage is one group
    static constexpr int MG = (TILES + WGS - 1) / WGS;       // items of a token tile
    static constexpr int W_BYTES = 64 * KB;                  // words of a row tile
    static constexpr int BLOCK = W_BYTES + 512;              // and its scales and zeros
    static constexpr int OFF_X = WGS * BLOCK;                // in a stage
    static constexpr int STAGE_BYTES = OFF_X + NMAX * KB * 2;  // rows have high and low parts
    // What a group adds per token row: its sum, and in the second product its scale. The first has one scale a row.
    static constexpr int STATS = GATED ? 1 : 2;
    static constexpr int STATS_BYTES = (GROUPS * STATS + GATED) * NMAX * 4;
    static constexpr int PARTS = GATED ? 1 : 2;              // of 64 output columns in a row tile
    static constexpr int PITCH = KB / 2;                     // bytes of a row of words
    static constexpr int FLIP_SHIFT = KB == 128 ? 1 : 2;     // rows that share a swizzle: 128 bytes of them
};
typedef Product<HIDDEN, GROUP_UP, 2 * WIDTH / 128, true, STAGES_UP> Up;
typedef Product<WIDTH, GROUP_DOWN, HIDDEN / 128, false, STAGES_DOWN> Down;

// Shared memory: the stages of either product, two buffers of stats, a buffer to transpose in per warpgroup, barriers
// (full and empty of either product's stages, items), items.
#define TPITCH (64 * 2 + 16)
#define STATS_BYTES larger(Up::STATS_BYTES, Down::STATS_BYTES)
#define T_BYTES (NOUT * TPITCH)
#define OFF_STATS larger(STAGES_UP * Up::STAGE_BYTES, STAGES_DOWN * Down::STAGE_BYTES)
#define OFF_T (OFF_STATS + 2 * STATS_BYTES)
#define OFF_BAR (OFF_T + WGS * T_BYTES)
#define OFF_ITEMS (OFF_BAR + 8 * (2 * STAGES_UP + 2 * STAGES_DOWN + ITEMS))

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
__device__ __forceinline__ void bulk_load(u32 dst, const void* src, u32 bytes, u32 bar, u64 policy) {
    asm volatile(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1], %2, [%3], %4;" ::"r"(
            dst),
        "l"(src), "r"(bytes), "r"(bar), "l"(policy)
        : "memory");
}
// Weights that are read once should not drive anything else out of the L2 cache.
__device__ __forceinline__ u64 cache_policy(bool once) {
    u64 first, normal;
    asm volatile("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(first));
    asm volatile("createpolicy.fractional.L2::evict_normal.b64 %0, 1.0;" : "=l"(normal));
    return once ? first : normal;
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
// The same value for all lanes, known as such to the compiler.
__device__ __forceinline__ int uniform(int value) { return __shfl_sync(0xffffffffu, value, 0); }
__device__ __forceinline__ void sync_warpgroup(int wg) { asm volatile("bar.sync %0, 128;" ::"r"(wg + 1) : "memory"); }

__device__ __forceinline__ void load_matrices(u32 (&r)[4], u32 addr) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(addr));
}
__device__ __forceinline__ void store_transposed(u32 addr, u32 value) {
    asm volatile("stmatrix.sync.aligned.m8n8.x1.trans.shared.b16 [%0], {%1};" ::"r"(addr), "r"(value) : "memory");
}

// d (+)= A[64, 32] B[32, 16 * N] in e4m3, 8 * N accumulators a thread.
template <int N>
struct Mma;
#define D8(i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3]), "+f"(d[i + 4]), "+f"(d[i + 5]), \
              "+f"(d[i + 6]), "+f"(d[i + 7])
#define MMA(N, SHAPE, OUTS, A, DESC, KEEP, ...)                                                                    \
    template <>                                                                                                    \
    struct Mma<N> {                                                                                              \
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
                float a = v[2 * j] - half_bits(back & 0xffff), b = v[2 * j + 1] - half_bits(back >> 16);
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
// 512 / power(exponent): weights come as q * 2^-9. Values that are not finite must not come out as such.
__device__ __forceinline__ float unscale(int exponent, float top) {
    return __float_as_uint(top) < 0x7f800000u ? power(263 - exponent) : __uint_as_float(0x7fc00000u);
}

// Where a ring of stages stands.
struct Ring {
    u32 full, empty;  // barriers
    u32 stage, phase;
    template <class P>
    __device__ __forceinline__ void next() {
        if (++stage == P::STAGES) stage = 0, phase ^= 1;
    }
    __device__ __forceinline__ void wait_full() const { bar_wait(full + 8 * stage, phase); }
    __device__ __forceinline__ void wait_empty() const { bar_wait(empty + 8 * stage, phase ^ 1); }
};

enum Kind { END, UP, DOWN };
struct Item {
    int kind, mgroup, tile, expert, row0, end;
    __device__ __forceinline__ int count() const { return end - row0; }
};
struct Tiles {
    const int *expert, *start;
    int most, slots;  // length of the lists; slots of all rows
};

// Item `index` of `real` token tiles. Tiles follow each other in slot order, so one ends where the next one starts.
__device__ __forceinline__ Item decode(int index, int real, const Tiles& tiles) {
    Item item;
    item.kind = index < real * Up::MG ? UP : index < real * (Up::MG + Down::MG) ? DOWN : END;
    if (item.kind == END) return item;
    int groups = item.kind == UP ? Up::MG : Down::MG;
    if (item.kind == DOWN) index -= real * Up::MG;
    item.tile = index / groups;
    item.mgroup = index % groups;
    item.expert = tiles.expert[item.tile];
    item.row0 = tiles.start[item.tile];
    item.end = item.tile + 1 < tiles.most ? tiles.start[item.tile + 1] : tiles.slots;
    return item;
}

__device__ __forceinline__ int load_acquire(const int* p) {
    int v;
    asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(v) : "l"(p) : "memory");
    return v;
}

// How a tile of 8 * N8 token rows is multiplied: high and low parts are columns of one product, of at most 32 rows, because
// a tensor core takes as long for fewer than 64 columns. More rows take two products of the same unpacked weights, so that
// a row gives the same bits in a tile of any size.
template <class P, int N8>
struct Columns {
    static constexpr int PRODUCTS = N8 > 4 ? 2 : 1;
    static constexpr int N = N8 / PRODUCTS;                  // of 8 rows in one product, and of 16 columns
    static constexpr u32 PART = P::KB / 16 * 128;  // bytes of 8 rows of one part; a high part is followed by its low part
    // A matrix of token rows for wgmma: 8 rows x 16 bytes lie together, 128 bytes from one to the next.
    static __device__ __forceinline__ u64 descriptor(u32 low) { return (u64)(PART >> 4) << 32 | low; }
};

// Unpack a warpgroup's 64 rows of one group.
template <class P>
__device__ __forceinline__ void unpack(u32 (&a)[P::KB / 32][4], u32 words) {
#pragma unroll
    for (int s = 0; s < P::KB / 64; ++s) {
        u32 r[4];
        load_matrices(r, words ^ (s * 32));
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            a[2 * s][i] = r[i] & 0x0f0f0f0fu;
            a[2 * s + 1][i] = (r[i] >> 4) & 0x0f0f0f0fu;
        }
    }
}

// Start the product of unpacked weights with the token rows of `part`.
template <class P, int N8>
__device__ __forceinline__ void start_product(float (&d)[8 * Columns<P, N8>::N], const u32 (&a)[P::KB / 32][4], u32 rows,
                                              int part) {
    typedef Columns<P, N8> C;
    rows += part * C::N * (2 * C::PART >> 4);
    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#pragma unroll
    for (int t = 0; t < P::KB / 32; ++t) Mma<C::N>::run(d, a[t], C::descriptor(rows + t * 16), t > 0);
    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}

// acc += s * (scale * (high + low) - zero * sum), see experts_hopper.py; where the scale is the row's it waits.
template <class P, int N8>
__device__ __forceinline__ void add_group(float (&acc)[4 * N8], float (&d)[8 * Columns<P, N8>::N], const float (&s)[2],
                                          const float (&z)[2], const float* group_stats, int part) {
    typedef Columns<P, N8> C;
#pragma unroll
    for (int i = 0; i < 8 * C::N; ++i) asm volatile("" : "+f"(d[i])::"memory");
#pragma unroll
    for (int n = 0; n < C::N; ++n) {
        int at = part * C::N + n;
        float stats[2 * P::STATS];  // of two columns
        if (P::GATED) *(float2*)stats = *(const float2*)(group_stats + at * 8);
        else *(float4*)stats = *(const float4*)(group_stats + at * 16);
#pragma unroll
        for (int half = 0; half < 2; ++half)
#pragma unroll
            for (int c = 0; c < 2; ++c) {
                int i = half * 2 + c;
                float t = d[n * 8 + i] + d[n * 8 + 4 + i];
                if (!P::GATED) t *= stats[2 * c + 1];
                acc[at * 4 + i] = fmaf(z[half], stats[c * P::STATS], fmaf(s[half], t, acc[at * 4 + i]));
            }
    }
}

// One item's main loop for one warpgroup. acc[mb][n8 * 4 + r]: r 0,1 row g, r 2,3 row g + 8; columns 2c, 2c + 1.
template <class P, int N8>
__device__ __forceinline__ void consume(float (&acc)[2][4 * N8], char* smem, Ring& ring, int wg, int tid, int buffer) {
    int lane = tid & 31, warp = tid >> 5;
#pragma unroll
    for (int mb = 0; mb < 2; ++mb)
#pragma unroll
        for (int i = 0; i < 4 * N8; ++i) acc[mb][i] = 0.f;
    const float* group_stats = (const float*)(smem + OFF_STATS + buffer * STATS_BYTES) + (lane & 3) * 2 * P::STATS;
    int row = warp * 16 + (lane & 15), flip = (row >> P::FLIP_SHIFT) & (P::KB / 32 - 1);
    u32 word_off = wg * P::BLOCK + row * P::PITCH + (((lane >> 4) ^ flip) << 4);
    int scale_off = wg * P::BLOCK + P::W_BYTES + (warp * 16 + (lane >> 2)) * 4;
#pragma unroll 1
    for (int kb = 0; kb < P::GROUPS; ++kb, group_stats += NMAX * P::STATS) {
        ring.wait_full();
        asm volatile("fence.proxy.async.shared::cta;" ::: "memory");  // cp.async wrote what wgmma is going to read
        const char* base = smem + ring.stage * P::STAGE_BYTES;
        u32 words = smem_addr(base) + word_off;
        u32 rows = (smem_addr(base) + P::OFF_X) >> 4 | (128 >> 4) << 16;
#pragma unroll
        for (int mb = 0; mb < 2; ++mb) {
            typedef Columns<P, N8> C;
            u32 a[P::KB / 32][4];
            float d[8 * C::N], s[2], z[2];
            unpack<P>(a, words + mb * 64 * P::PITCH);
            start_product<P, N8>(d, a, rows, 0);
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                u32 pair = *(const u32*)(base + scale_off + mb * 256 + half * 32);
                s[half] = half_bits(pair & 0xffff);
                z[half] = -s[half] * half_bits(pair >> 16);
            }
#pragma unroll
            for (int part = 0; part < C::PRODUCTS; ++part) {
                if (part > 0) start_product<P, N8>(d, a, rows, part);
                asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
                add_group<P, N8>(acc[mb], d, s, z, group_stats, part);
            }
        }
        // Not before every lane has used its scales: loads may still be under way when what was started after them is over.
        __syncwarp();
        if (lane == 0) bar_arrive(ring.empty + 8 * ring.stage);
        ring.next<P>();
    }
    if (P::GATED)
#pragma unroll
        for (int n = 0; n < N8; ++n) {
            float2 scale = *(const float2*)(group_stats + n * 8);  // behind the groups
#pragma unroll
            for (int i = 0; i < 8; ++i) acc[i >> 2][n * 4 + (i & 3)] *= i & 1 ? scale.y : scale.x;
        }
}

// 64 columns are one group of the next product: its parts and stats, from BF16 rows in shared memory; 4 threads a row.
template <class P>
__device__ __forceinline__ void split_out(const char* t, int tid, int tile, int row0, int count, u8* out, float2* out_stats) {
    int row = tid >> 2, q = tid & 3;
    const uint4* p = (const uint4*)(t + row * TPITCH) + (q >> 1) * 2 + (q & 1);
    Piece piece(p[0], p[4]);
    float top = piece.top(), sum = piece.sum();
#pragma unroll
    for (int step = 1; step < 4; step *= 2) {
        top = fmaxf(top, __shfl_xor_sync(0xffffffffu, top, step));
        sum += __shfl_xor_sync(0xffffffffu, sum, step);
    }
    if (row >= count) return;
    int exponent = scale_exponent(top);
    uint4 high, low;
    piece.split(power(exponent), high, low);
    u64 group = (u64)(row0 + row) * P::TILES + tile;
    uint4* target = (uint4*)(out + group * 128) + q;
    target[0] = high;
    target[4] = low;
    if (q == 0) out_stats[group] = make_float2(sum, unscale(exponent, top));
}

// Transposes the accumulators to token rows through shared memory and writes them out: BF16 rows, or with GATED the
// activations split for the next product, with their stats.
template <class P, int N8>
__device__ __forceinline__ void write_out(float (&acc)[2][4 * N8], char* smem, int wg, int tid, int tile, const Item& item,
                                          u8* out, float2* out_stats) {
    int lane = tid & 31, warp = tid >> 5;
    char* t = smem + OFF_T + wg * T_BYTES;
    u32 row_addr = smem_addr(t) + (lane & 7) * TPITCH;
#pragma unroll
    for (int first = 0; first < 8 * N8; first += NOUT) {
        int row0 = item.row0 + first, count = min(NOUT, item.count() - first);
#pragma unroll
        for (int part = 0; part < P::PARTS; ++part) {
            sync_warpgroup(wg);  // the rows before these have left
#pragma unroll
            for (int n = first / 8; n < N8 && n < (first + NOUT) / 8; ++n) {
                u32 at = row_addr + (n * 8 - first) * TPITCH;
                if (P::GATED) {
#pragma unroll
                    for (int mb = 0; mb < 2; ++mb) {
                        float* v = &acc[mb][n * 4];
                        u32 h = pack_bf16(gelu_tanh(v[0]) * v[2], gelu_tanh(v[1]) * v[3]);
                        store_transposed(at + (mb * 32 + warp * 8) * 2, h);
                    }
                } else {
                    float* v = &acc[part][n * 4];
                    store_transposed(at + warp * 16 * 2, pack_bf16(v[0], v[1]));
                    store_transposed(at + (warp * 16 + 8) * 2, pack_bf16(v[2], v[3]));
                }
            }
            sync_warpgroup(wg);
            if (P::GATED) {
                split_out<P>(t, tid, tile, row0, count, out, out_stats);
                continue;
            }
            for (int i = tid; i < count * 8; i += 128)
                ((uint4*)(out + ((u64)(row0 + i / 8) * P::TILES + tile) * 256 + part * 128))[i % 8] =
                    ((const uint4*)(t + i / 8 * TPITCH))[i % 8];
        }
    }
}

// One item of a consuming warpgroup.
template <class P>
__device__ __forceinline__ void multiply(const Item& item, char* smem, Ring& ring, int wg, int tid, int buffer, u8* out,
                                         float2* out_stats) {
    int tile = item.mgroup * WGS + wg;
    if (tile >= P::TILES) {  // this warpgroup has no rows here; it still frees the stages it skips
        for (int kb = 0; kb < P::GROUPS; ++kb, ring.next<P>()) {
            ring.wait_full();
            if ((tid & 31) == 0) bar_arrive(ring.empty + 8 * ring.stage);
        }
        return;
    }
    int n8 = (item.count() + 7) >> 3;
#define RUN(N)                                                              \
    {                                                                       \
        float acc[2][4 * N];                                                \
        consume<P, N>(acc, smem, ring, wg, tid, buffer);                    \
        write_out<P, N>(acc, smem, wg, tid, tile, item, out, out_stats);    \
    }
    if (n8 <= 1) RUN(1)
    else if (n8 == 2) RUN(2)
    else if (n8 == 3) RUN(3)
    else if (NMAX == 32 || n8 == 4) RUN(4)
#if NMAX > 32
    else if (n8 <= 6) RUN(6)
    else RUN(8)
#endif
}

// What the producing warpgroup reads for one product.
struct Sources {
    const u8 *x, *weights;
    const float *stats, *row_scale;  // row_scale: only of the first product
    u64 policy;                      // of the weights in the L2 cache
};

// This thread's share of a token tile: the rows of its 16-byte pieces, then that of its stats.
template <class P>
struct Share {
    static constexpr int PER_ROW = P::KB / 8, STEP = 128 / PER_ROW, TURNS = NMAX / STEP;
    int row[TURNS + 1];
    __device__ __forceinline__ void find(const Item& item, int p, const int* rows) {
#pragma unroll
        for (int r = 0; r <= TURNS; ++r) {
            int slot = item.row0 + min(r < TURNS ? r * STEP + p / PER_ROW : p % NMAX, item.count() - 1);
            row[r] = P::GATED ? rows[slot] : slot;
        }
    }
};

// Load an item's stages; `after` runs after each.
template <class P, class F>
__device__ __forceinline__ void load_item(const Item& item, const Share<P>& share, char* smem, Ring& ring, int p, int buffer,
                                          const Sources& from, F after) {
    const int step = Share<P>::STEP, turns = Share<P>::TURNS;
    const int first = p / Share<P>::PER_ROW, piece = p % Share<P>::PER_ROW;
    const u32 dst = (2 * (first >> 3) + piece / (P::KB / 16)) * (P::KB / 16 * 128) + piece % (P::KB / 16) * 128 + (first & 7) * 16;
    int tile = item.mgroup * WGS, end = min(tile + WGS, P::TILES), count = item.count();
    u32 offset[turns];  // of pieces in x, which is smaller than 4 GiB
#pragma unroll
    for (int r = 0; r < turns; ++r) offset[r] = share.row[r] * (2 * P::K) + piece * 16;
    for (int kb = 0; kb < P::GROUPS; ++kb) {
        ring.wait_empty();
        u32 base = smem_addr(smem + ring.stage * P::STAGE_BYTES), bar = ring.full + 8 * ring.stage;
        if (p == 0) {
            bar_expect(bar, (end - tile) * P::BLOCK);
            for (int t = tile, next; t < end; t = next) {  // READ_TILES row tiles lie together, one group after the other
                int together = t / READ_TILES * READ_TILES, width = min(READ_TILES, P::TILES - together);
                next = min(end, together + READ_TILES);
                u64 block = ((u64)item.expert * P::TILES + together) * P::GROUPS + kb * width + t - together;
                bulk_load(base + (t - tile) * P::BLOCK, from.weights + block * P::BLOCK, (next - t) * P::BLOCK, bar,
                          from.policy);
            }
        }
#pragma unroll
        for (int r = 0; r < turns; ++r)
            if (r * step + first < count)
                copy16(base + P::OFF_X + dst + r * (step / 8) * (P::KB / 8 * 128), from.x + offset[r] + kb * (2 * P::KB));
        if (kb == 0) {
            int row = share.row[turns];
            u32 target = smem_addr(smem + OFF_STATS + buffer * STATS_BYTES) + p % NMAX * (4 * P::STATS);
            const float* stats = from.stats + (u64)row * (P::GROUPS * P::STATS);
            for (int g = p / NMAX; g < P::GROUPS; g += 128 / NMAX)
                for (int j = 0; j < P::STATS; ++j)
                    copy4(target + g * (NMAX * P::STATS * 4) + j * 4, stats + g * P::STATS + j);
            if (P::GATED && p < NMAX) copy4(target + P::GROUPS * (NMAX * 4), from.row_scale + row);
        }
        copies_arrive(bar);
        ring.next<P>();
        after(kb);
    }
}

// state: the next item beyond one per block, then how many row tiles of the first product every token tile has; zeros.
__device__ __forceinline__ void produce(char* smem, Ring up, Ring down, u32 announced, int p, const Sources& from_up,
                                        const Sources& from_down, const int* rows, const Tiles& tiles, int* state) {
    volatile int* board = (volatile int*)(smem + OFF_ITEMS);  // ITEMS items of 8 numbers, then two indices, then a sum
    volatile int* following = board + ITEMS * 8;
    int real = 0;
    for (int t = p; t < tiles.most; t += 128) real += tiles.expert[t] >= 0;
    for (int step = 1; step < 32; step *= 2) real += __shfl_xor_sync(0xffffffffu, real, step);
    if ((p & 31) == 0) following[2 + (p >> 5)] = real;
    sync_warpgroup(WGS);
    real = following[2] + following[3] + following[4] + following[5];

    Item item = decode(blockIdx.x, real, tiles);
    Share<Up> share_up;
    Share<Down> share_down;
    auto prepare = [&](const Item& it) {
        if (it.kind == UP) share_up.find(it, p, rows);
        if (it.kind == DOWN) share_down.find(it, p, rows);
    };
    prepare(item);
    for (int n = 0, was = UP;; ++n) {
        if (p == 0) {
            volatile int* slot = board + n % ITEMS * 8;
            slot[0] = item.kind, slot[1] = item.mgroup, slot[2] = item.tile, slot[3] = item.row0, slot[4] = item.end;
            bar_arrive(announced + 8 * (n % ITEMS));
        }
        if (item.kind == END) return;
        Item next;
        const int middle = (item.kind == UP ? Up::GROUPS : Down::GROUPS) / 2;
        auto find_next = [&](int kb) {
            if (kb == 0 && p == 0) following[n & 1] = gridDim.x + atomicAdd(state, 1);
            if (kb != middle) return;
            sync_warpgroup(WGS);  // the index has been written
            next = decode(following[n & 1], real, tiles);
            prepare(next);  // the present item's rows are not needed any more
        };
        if (item.kind == UP) {
            load_item<Up>(item, share_up, smem, up, p, n & 1, from_up, find_next);
        } else {
            if (was == UP)  // both products' stages are the same memory
                for (int s = 0; s < Up::STAGES; ++s, up.next<Up>()) up.wait_empty();
            while (load_acquire(state + 1 + item.tile) < Up::TILES) __nanosleep(40);
            load_item<Down>(item, share_down, smem, down, p, n & 1, from_down, find_next);
        }
        was = item.kind;
        item = next;
    }
}

#ifndef ONLY_SPLIT  // torch compiles one kernel at a time, and this one takes seconds
// x: split rows, sums and scales of split_rows. inner, inner_stats: what the first product leaves for the second.
extern "C" __global__ void __launch_bounds__((WGS + 1) * 128, 1)
    experts_products(const u8* x, const float* sums, const float* row_scale, const u8* up_weights, const u8* down_weights,
                     const int* rows, const int* tile_e, const int* tile_r,
                     int max_tiles, int slots, int once, u8* inner, float2* inner_stats, u8* out, int* state) {
    extern __shared__ __align__(1024) char smem[];
    u32 bars = smem_addr(smem + OFF_BAR);
    Ring up = {bars, bars + 8 * STAGES_UP, 0, 0}, down = {bars + 16 * STAGES_UP, bars + 16 * STAGES_UP + 8 * STAGES_DOWN, 0, 0};
    u32 announced = down.empty + 8 * STAGES_DOWN;
    int warp = uniform(threadIdx.x >> 5);
    if (threadIdx.x == 0) {
        // full: the bytes of the bulk copies and 128 threads' gathers; empty: a lane of every consuming warp.
        for (int s = 0; s < STAGES_UP; ++s) bar_init(up.full + 8 * s, 129), bar_init(up.empty + 8 * s, WGS * 4);
        for (int s = 0; s < STAGES_DOWN; ++s) bar_init(down.full + 8 * s, 129), bar_init(down.empty + 8 * s, WGS * 4);
        for (int s = 0; s < ITEMS; ++s) bar_init(announced + 8 * s, 1);
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
    __syncthreads();
    if (warp >= WGS * 4) {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(PRODUCER_REGS));
        u64 policy = cache_policy(once);
        Sources from_up = {x, up_weights, sums, row_scale, policy};
        Sources from_down = {inner, down_weights, (const float*)inner_stats, 0, policy};
        Tiles tiles = {tile_e, tile_r, max_tiles, slots};
        produce(smem, up, down, announced, threadIdx.x - WGS * 128, from_up, from_down, rows, tiles, state);
        return;
    }
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(CONSUMER_REGS));
    int wg = warp >> 2, tid = threadIdx.x & 127;
    volatile int* board = (volatile int*)(smem + OFF_ITEMS);
    for (int n = 0;; ++n) {
        bar_wait(announced + 8 * (n % ITEMS), (n / ITEMS) & 1);
        volatile int* slot = board + n % ITEMS * 8;
        Item item = {uniform(slot[0]), uniform(slot[1]), slot[2], 0, uniform(slot[3]), uniform(slot[4])};
        if (item.kind == END) return;
        if (item.kind == UP) {
            multiply<Up>(item, smem, up, wg, tid, n & 1, inner, inner_stats);
            sync_warpgroup(wg);
            if (tid == 0 && item.mgroup * WGS + wg < Up::TILES) {
                __threadfence();  // all of the warpgroup's rows are out before the count says so
                atomicAdd(state + 1 + item.tile, 1);
            }
        } else {
            multiply<Down>(item, smem, down, wg, tid, n & 1, out, inner_stats);
        }
    }
}
#endif

// x BF16 [count, HIDDEN] into high and low parts [count, groups, 2, KB], sums [count, groups] in scaled units, and scales
// [count]. A warp a row. Also zeros `words` numbers of state.
extern "C" __global__ void __launch_bounds__(128)
    split_rows(const u8* x, u8* out, float* out_sums, float* out_scales, int count, int* state, int words) {
    for (int i = blockIdx.x * 128 + threadIdx.x; i < words; i += gridDim.x * 128) state[i] = 0;
    const int KB = Up::KB, K = Up::K, GROUPS = Up::GROUPS;
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
    if (lane == 0) out_scales[row] = unscale(exponent, top);
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
