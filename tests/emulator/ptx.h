// PTX instructions of Hopper as functions, for kernels on a CPU (emulator/__init__.py puts them in the place of the
// assembler), and what CUDA adds to C++.
//
// What is asynchronous happens as late as the rules allow: products of a warpgroup, stores of the engine and copies by
// threads where their thread waits for them, copies of the engine some time after (block.h). What was not waited for is
// not there yet, or no longer, and a result that is right for some seeds is seldom so by luck. 16 bits are bfloat16.
#pragma once
#include "block.h"

namespace emulator {

// ---- the engine: maps are 16 words, as emulator/__init__.py writes them

struct View {
    uint64_t words[16];

    char* base() const { return reinterpret_cast<char*>(words[0]); }
    int dimensions() const { return int(words[1] & 0xff); }
    int itemsize() const { return int(words[1] >> 8 & 0xff); }
    bool swizzled() const { return words[1] >> 16 & 1; }
    bool walks() const { return words[1] >> 17 & 1; }  // over pixels, from corner to corner
    int64_t size(int i) const { return int64_t(words[2 + i]); }
    int64_t pitch(int i) const { return i ? int64_t(words[6 + i]) : itemsize(); }
    int64_t box(int i) const { return int64_t(i < 4 ? words[11] >> 16 * i & 0xffff : words[12]); }
    int corner(int i) const { return int16_t(words[13] >> 16 * i); }  // the first pixel's (w, h), the last one's
    int step(int i) const { return int(words[14] >> 16 * i & 0xffff); }

    char* at(const int64_t* index) const {
        char* place = base();
        for (int i = 0; i < dimensions(); ++i) {
            if (index[i] < 0 || index[i] >= size(i)) return nullptr;
            place += index[i] * pitch(i);
        }
        return place;
    }

    // f(bytes into the box, the value or null where there is none), of every value of a box.
    template <class F>
    void each(const std::vector<int>& from, F f) const {
        int64_t total = 1, index[5];
        for (int i = 0; i < dimensions(); ++i) total *= box(i);
        for (int64_t n = 0; n < total; ++n) {
            int64_t rest = n;
            for (int i = 0; i < dimensions(); ++i) index[i] = from[i] + rest % box(i), rest /= box(i);
            f(n * itemsize(), at(index));
        }
    }

    // The same of a column of pixels from (c, w, h, n) on, each moved by (w, h).
    template <class F>
    void each_pixel(const std::vector<int>& from, int offset_w, int offset_h, F f) const {
        int w = from[1], h = from[2], image = from[3];
        for (int64_t n = 0; n < box(1); ++n) {
            for (int64_t c = 0; c < box(0); ++c) {
                const int64_t index[] = {from[0] + c, w + offset_w, h + offset_h, image};
                f((n * box(0) + c) * itemsize(), at(index));
            }
            if ((w += step(0)) < size(1) + corner(2)) continue;
            w = corner(0);
            if ((h += step(1)) < size(2) + corner(3)) continue;
            h = corner(1), ++image;
        }
    }
};

template <class Map>
View view_of(const Map* map, size_t coordinates, bool walks) {
    View view;
    static_assert(sizeof *map == sizeof view, "16 words");
    memcpy(&view, map, sizeof view);
    if (int(coordinates) != view.dimensions() || walks != view.walks()) fail("a copy that does not go with its map");
    if (view.swizzled() && view.box(0) * view.itemsize() != 128) fail("swizzled rows of %d values", int(view.box(0)));
    return view;
}

// Brings values of a box, as visit(f) finds them.
template <class Visit>
void bring(const View& view, uint32_t to, uint32_t barrier, Visit visit) {
    if (to % (view.swizzled() ? 1024 : 128)) fail("a box is loaded to %u", to);
    copies.push_back([=] {
        int64_t bytes = 0;
        visit([&](int64_t i, const char* value) {
            const uint32_t at = to + uint32_t(i), size = uint32_t(view.itemsize());
            char* const there = place<char>(view.swizzled() ? swizzled(at) : at);
            value ? memcpy(there, value, size) : memset(there, 0, size);
            bytes += size;
        });
        Barrier& waiting = at(barrier);
        waiting.bytes -= bytes;
        settle(waiting);
    });
}
template <class X, class Visit>
void take_away(const View& view, uint32_t from, Visit visit) {
    if (from % (view.swizzled() ? 1024 : 128)) fail("a box is stored from %u", from);
    open_group(fibers[current].stores).push_back([=] {
        visit([&](int64_t i, char* value) {
            const uint32_t at = from + uint32_t(i);
            const X stored = read_by_engine<X>(view.swizzled() ? swizzled(at) : at);
            if (value) memcpy(value, &stored, sizeof stored);
        });
    });
}
template <class Visit>
void take_away(const View& view, uint32_t from, Visit visit) {
    view.itemsize() == 1   ? take_away<uint8_t>(view, from, visit)
    : view.itemsize() == 2 ? take_away<uint16_t>(view, from, visit)
                           : take_away<uint32_t>(view, from, visit);
}
template <class Map, class... From>
void load_box(uint32_t to, const Map* map, uint32_t barrier, From... from) {
    const View view = view_of(map, sizeof...(from), false);
    bring(view, to, barrier, [=, first = std::vector<int>{int(from)...}](auto f) { view.each(first, f); });
}
template <class Map>
void load_pixels(uint32_t to, const Map* map, uint32_t barrier, int c, int w, int h, int n, int offset_w, int offset_h) {
    const View view = view_of(map, 4, true);
    bring(view, to, barrier, [=](auto f) { view.each_pixel({c, w, h, n}, offset_w, offset_h, f); });
}
template <class Map, class... To>
void store_box(const Map* map, uint32_t from, To... to) {
    const View view = view_of(map, sizeof...(to), false);
    take_away(view, from, [=, first = std::vector<int>{int(to)...}](auto f) { view.each(first, f); });
}
template <class Map>
void store_pixels(const Map* map, uint32_t from, int c, int w, int h, int n) {
    const View view = view_of(map, 4, true);
    take_away(view, from, [=](auto f) { view.each_pixel({c, w, h, n}, 0, 0, f); });
}
// Of neighbouring bytes.
inline void load_bytes(uint32_t to, const void* from, uint32_t bytes, uint32_t barrier) {
    if (to % 16 || bytes % 16 || uintptr_t(from) % 16) fail("%u bytes are loaded to %u", bytes, to);
    copies.push_back([=] {
        for (uint32_t i = 0; i < bytes; ++i) *place<char>(to + i) = static_cast<const char*>(from)[i];
        Barrier& waiting = at(barrier);
        waiting.bytes -= bytes;
        settle(waiting);
    });
}
inline void commit_stores() { fibers[current].stores.emplace_back(); }
inline void await_groups(std::deque<std::vector<Work>>& groups, int pending) {
    for (; int(groups.size()) - 1 > pending; groups.pop_front())
        for (const Work& work : groups.front()) work();
}
inline void await_stores(int pending) { await_groups(fibers[current].stores, pending); }

// ---- copies by threads, of zeros behind so many bytes

inline void copy_some(uint32_t to, const void* from, int bytes, int readable = 16) {
    place<char>(to + bytes - 1);
    open_group(fibers[current].loads).push_back([=] {
        for (int i = 0; i < bytes; ++i)
            write<char>(to + i, i < readable ? static_cast<const char*>(from)[i] : 0);
    });
}
inline void copy_sixteen(uint32_t to, const void* from, int readable = 16) { copy_some(to, from, 16, readable); }
inline void commit_copies() { fibers[current].loads.emplace_back(); }
inline void await_copies(int pending) { await_groups(fibers[current].loads, pending); }
// All that have been started, then this thread arrives; both when the scheduler comes to it.
inline void arrive_with_copies(uint32_t barrier) {
    const int thread = current;
    copies.push_back([=] {
        const int before = current;
        current = thread;
        for (auto& group : fibers[thread].loads)
            for (const Work& load : group) load();
        fibers[thread].loads.clear();
        barrier_arrive(barrier);
        current = before;
    });
}

// ---- matrices of 8 x 8 values

template <bool ACROSS>
void load_matrices(uint32_t& a, uint32_t& b, uint32_t& c, uint32_t& d, uint32_t row) {
    const int me = current % WARP;
    uint32_t* const words[] = {&a, &b, &c, &d};
    fibers[current].slot[0] = row;
    meet_warp();
    for (int i = 0; i < 4; ++i) {
        *words[i] = 0;
        for (int half = 0; half < 2; ++half) {
            const int down = me / 4, across = 2 * (me % 4) + half;
            const uint32_t from = lane(8 * i + (ACROSS ? across : down)).slot[0];
            *words[i] |= uint32_t(read<uint16_t>(from + 2 * (ACROSS ? down : across))) << 16 * half;
        }
    }
    meet_warp();
}
template <bool ACROSS>
void store_matrices(uint32_t row, uint32_t a, uint32_t b, uint32_t c, uint32_t d) {
    const int me = current % WARP;
    Fiber& mine = fibers[current];
    mine.slot[0] = a, mine.slot[1] = b, mine.slot[2] = c, mine.slot[3] = d;
    meet_warp();
    for (int i = 0; i < 8; ++i) {
        const int down = ACROSS ? i : me % 8, across = ACROSS ? me % 8 : i;
        write<uint16_t>(row + 2 * i, lane(4 * down + across / 2).slot[me / 8] >> 16 * (across % 2));
    }
    meet_warp();
}
inline void turn_matrix(uint32_t& word) {
    const int row = current % WARP / 4, column = current % 4 * 2;
    fibers[current].slot[0] = word;
    meet_warp();
    const uint32_t low = lane(4 * column + row / 2).slot[0], high = lane(4 * column + 4 + row / 2).slot[0];
    word = (low >> 16 * (row % 2) & 0xffff) | (high >> 16 * (row % 2)) << 16;
    meet_warp();
}

// ---- products of a warp: 16 rows by 8 columns, over 8 words of two values, or 4

inline void multiply_warp(float& d0, float& d1, float& d2, float& d3, const uint32_t* a, const uint32_t* b, int words) {
    const int me = current % WARP;
    uint32_t* const slot = fibers[current].slot;
    memcpy(slot, a, 16), memcpy(slot + 4, b, 8);
    meet_warp();
    float* const sums[] = {&d0, &d1, &d2, &d3};
    for (int i = 0; i < 4; ++i) {
        const int row = me / 4, column = 2 * (me % 4) + i % 2;
        for (int w = 0; w < words; ++w) {
            const uint32_t left = lane(row * 4 + w % 4).slot[i / 2 + 2 * (w / 4)];
            const uint32_t right = lane(column * 4 + w % 4).slot[4 + w / 4];
            for (int by : {0, 16}) *sums[i] += from_bf16(left >> by) * from_bf16(right >> by);
        }
    }
    meet_warp();
}
inline void multiply_fragments(float& d0, float& d1, float& d2, float& d3, uint32_t a0, uint32_t a1, uint32_t a2,
                               uint32_t a3, uint32_t b0, uint32_t b1) {
    const uint32_t a[] = {a0, a1, a2, a3}, b[] = {b0, b1};
    multiply_warp(d0, d1, d2, d3, a, b, 8);
}
inline void multiply_halves(float& d0, float& d1, float& d2, float& d3, uint32_t a0, uint32_t a1, uint32_t b0) {
    const uint32_t a[] = {a0, a1, 0, 0}, b[] = {b0, 0};
    multiply_warp(d0, d1, d2, d3, a, b, 4);
}

// 16 rows by 8 columns, over 8 words of one value.
inline void multiply_tf32(float& d0, float& d1, float& d2, float& d3, uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3,
                          uint32_t b0, uint32_t b1) {
    const int me = current % WARP;
    uint32_t* const slot = fibers[current].slot;
    slot[0] = a0, slot[1] = a1, slot[2] = a2, slot[3] = a3, slot[4] = b0, slot[5] = b1;
    meet_warp();
    float* const sums[] = {&d0, &d1, &d2, &d3};
    const auto value = [](uint32_t bits) { return bits_as<float>(bits & ~0x1fffu); };
    for (int i = 0; i < 4; ++i)
        for (int k = 0; k < 8; ++k)
            *sums[i] += value(lane(me / 4 * 4 + k % 4).slot[i / 2 + 2 * (k / 4)]) *
                        value(lane((2 * (me % 4) + i % 2) * 4 + k % 4).slot[4 + k / 4]);
    meet_warp();
}

// ---- products of a warpgroup

// Value (m, k) of an operand, m the row or column that the product keeps.
inline float operand_value(uint64_t operand, bool across, int m, int k) {
    const uint32_t start = (operand & 0x3fff) << 4, block_bytes = (operand >> 16 & 0x3fff) << 4;
    const uint32_t group = (operand >> 32 & 0x3fff) << 4;
    if (operand >> 62 == 0) {  // not swizzled: eight of the depth, or rows or columns, 16 bytes each, one after the other
        const uint32_t place = across ? m % 8 * 2 + k % 8 * 16 : m % 8 * 16 + k % 8 * 2;
        return from_bf16(read_by_engine<uint16_t>(start + m / 8 * group + k / 8 * block_bytes + place));
    }
    if (operand >> 62 != 1) fail("an operand that is not swizzled by 128 bytes");
    const uint32_t address = across ? start + m / 64 * block_bytes + k / 8 * group + k % 8 * 128 + m % 64 * 2
                                    : start + m / 8 * group + m % 8 * 128 + k * 2;
    return from_bf16(read_by_engine(swizzled(address)));
}
inline void run(const Product& p) {
    const int thread = current % 128, row = thread / 32 * 16 + thread % 32 / 4, column = thread % 4 * 2;
    for (int i = 0; i < p.values; ++i) {
        const int m = row + i / 2 % 2 * 8, n = column + i / 4 * 8 + i % 2;
        float sum = p.keep ? p.sum[i] : 0.0f;
        for (int k = 0; k < 16; ++k) {
            const uint32_t word = p.held[k % 8 / 2][k / 8 * 2 + i / 2 % 2];
            const float a = p.a_held ? from_bf16(word >> 16 * (k % 2)) : operand_value(p.a, p.a_across, m, k);
            sum += a * operand_value(p.b, p.b_across, n, k);
        }
        p.sum[i] = sum;
    }
}
inline void multiply(float& sum, int values, uint64_t a, uint64_t b, int keep, int a_across, int b_across) {
    open_group(fibers[current].products).push_back({&sum, a, b, values, !!keep, !!a_across, !!b_across, false, {}});
}
// What is in registers must not change until the wait, which is not held against a kernel here.
inline void multiply_held(float& sum, int values, uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, uint64_t b, int keep,
                          int b_across) {
    Product product{&sum, 0, b, values, !!keep, false, !!b_across, true, {}};
    const uint32_t words[] = {a0, a1, a2, a3};
    memcpy(fibers[current].slot, words, sizeof words);
    meet_warp();
    for (int i = 0; i < 4; ++i) memcpy(product.held[i], lane(current % WARP / 4 * 4 + i).slot, sizeof words);
    meet_warp();
    open_group(fibers[current].products).push_back(product);
}
inline void commit_products() { fibers[current].products.emplace_back(); }
inline void await_products(int pending) {
    auto& groups = fibers[current].products;
    while (int(groups.size()) - 1 > pending) {
        for (const Product& product : groups.front()) run(product);
        groups.pop_front();
    }
    meet_warp();  // which waits as one
}

// ---- arithmetic

inline void round_pair(uint32_t& pair, float high, float low) { pair = uint32_t(to_bf16(high)) << 16 | to_bf16(low); }
inline void equal_halves(uint32_t& to, uint32_t a, uint32_t b) {  // of whole numbers
    to = ((a ^ b) & 0xffff ? 0 : 0xffffu) | ((a ^ b) >> 16 ? 0 : 0xffff0000u);
}
inline void fma_pair(uint32_t& to, uint32_t a, uint32_t b, uint32_t c) {
    const auto one = [&](int by) { return fmaf(from_bf16(a >> by), from_bf16(b >> by), from_bf16(c >> by)); };
    round_pair(to, one(16), one(0));
}
inline float rectified(float x) { return x != x || x > 0 ? x : 0.0f; }
inline void round_rectified(uint32_t& pair, float high, float low) { round_pair(pair, rectified(high), rectified(low)); }
inline void round_tf32(uint32_t& to, float x) { to = (bits_as<uint32_t>(x) + 0x1000) & ~0x1fffu; }
inline void round_one(uint16_t& to, float x) { to = to_bf16(x); }
inline void fma_where(float& v, float scale, float shift, uint32_t wanted) {
    if (wanted) v = fmaf(v, scale, shift);
}
inline void round_half(uint16_t& to, float x) { to = to_f16(x); }
inline void round_halves(uint32_t& pair, float high, float low) { pair = uint32_t(to_f16(high)) << 16 | to_f16(low); }
inline void widen_half(float& to, uint16_t bits) { to = from_f16(bits); }
inline void widen_halves(float& low, float& high, uint32_t pair) { low = from_f16(pair), high = from_f16(pair >> 16); }
inline void inverse(double& to, double x) { to = 1.0 / x; }
inline void inverse_root(double& to, double x) { to = 1.0 / sqrt(x); }
inline void inverse(float& to, float x) { to = 1.0f / x; }
inline void power_of_two(float& to, float x) { to = exp2f(x); }
inline void larger(float& to, float a, float b) { to = a != a ? a : b != b ? b : max(a, b); }
inline void smaller(float& to, float a, float b) { to = a != a ? a : b != b ? b : min(a, b); }
inline void larger(uint32_t& to, uint32_t a, uint32_t b) {  // of floats
    float x;
    larger(x, bits_as<float>(a), bits_as<float>(b));
    to = bits_as<uint32_t>(x);
}
// f(a, b) of each of two values.
template <class F>
uint32_t of_each(uint32_t a, uint32_t b, F f) {
    return uint32_t(f(from_bf16(a >> 16), from_bf16(b >> 16))) << 16 | uint16_t(f(from_bf16(a), from_bf16(b)));
}
inline void larger_pair(uint32_t& to, uint32_t a, uint32_t b) {
    to = of_each(a, b, [](float x, float y) {
        larger(x, x, y);
        return to_bf16(x);
    });
}
inline void equal_pair(uint32_t& to, uint32_t a, uint32_t b) {
    to = of_each(a, b, [](float x, float y) { return x == y ? 0xffff : 0; });
}
inline void greater_pair(uint32_t& to, uint32_t a, uint32_t b) {
    to = of_each(a, b, [](float x, float y) { return x > y ? 0xffff : 0; });
}
inline void thread_number(uint32_t& to) { to = uint32_t(current); }
inline void block_number(uint32_t& to) { to = block % sizes[0]; }
inline void load_half(uint16_t& to, uint32_t from) { to = read<uint16_t>(from); }
template <class X>
void load_word(X& to, uint32_t from) {
    static_assert(sizeof(X) == 4, "a word");
    to = read<X>(from);
}
template <class X>
void load_four(X& a, X& b, X& c, X& d, uint32_t from) {
    static_assert(sizeof(X) == 4, "words");
    read<uint4>(from);
    a = read<X>(from), b = read<X>(from + 4), c = read<X>(from + 8), d = read<X>(from + 12);
}
template <class X>
void load_two(X& a, X& b, uint32_t from) {
    static_assert(sizeof(X) == 4, "words");
    read<uint64_t>(from);
    a = read<X>(from), b = read<X>(from + 4);
}
template <class... X>
void store(uint32_t to, X... values) {
    constexpr int BYTES = int((sizeof(X) + ...));
    if (to % BYTES) fail("an access of %d bytes at %u", BYTES, to);
    ((write(to, values), to += sizeof(X)), ...);
}
inline void load_global(uint32_t& a, uint32_t& b, const uint2* from) { a = from->x, b = from->y; }
inline void load_global(uint32_t& a, uint32_t& b, uint32_t& c, uint32_t& d, const uint4* from) {
    a = from->x, b = from->y, c = from->z, d = from->w;
}
inline void store_global(float* to, float a, float b) { to[0] = a, to[1] = b; }
inline void store_global(float* to, float a, float b, float c, float d) { to[0] = a, to[1] = b, to[2] = c, to[3] = d; }
inline void store_global(void* to, uint32_t a, uint32_t b, uint32_t c, uint32_t d) {
    const uint32_t words[] = {a, b, c, d};
    memcpy(to, words, sizeof words);
}
inline void take_number(int& number, uint32_t* counter) { number = int((*counter)++); }
inline void count_round(uint32_t& before, uint32_t* counter, uint32_t last) {
    before = *counter;
    *counter = before >= last ? 0 : before + 1;
}
inline void store_where(uint32_t to, uint32_t a, uint32_t b, uint32_t c, uint32_t d, uint32_t wanted) {
    if (wanted) store(to, a, b, c, d);
}

}  // namespace emulator


#define threadIdx (emulator::of_thread())
#define blockIdx (emulator::of_block())
#define blockDim (emulator::Place3{emulator::sizes[3], emulator::sizes[4], 1})
#define gridDim (emulator::Place3{emulator::sizes[0], emulator::sizes[1], emulator::sizes[2]})
inline void __syncwarp() { emulator::meet_warp(); }
inline void __syncthreads() { emulator::meet_block(); }
template <class X>
X __shfl_sync(unsigned, X value, int from) { return emulator::from_lane(value, from); }
template <class X>
X __shfl_xor_sync(unsigned, X value, int mask) { return emulator::from_lane(value, emulator::current % 32 ^ mask); }
inline uint32_t __ballot_sync(unsigned, bool set) {
    uint32_t all = 0;
    for (int i = 0; i < emulator::WARP; ++i) all |= uint32_t(emulator::from_lane(set, i)) << i;
    return all;
}
inline bool __any_sync(unsigned mask, bool set) { return __ballot_sync(mask, set) != 0; }
inline uint32_t __reduce_or_sync(unsigned, uint32_t value) {
    uint32_t all = 0;
    for (int i = 0; i < emulator::WARP; ++i) all |= emulator::from_lane(value, i);
    return all;
}
template <class X>
X __shfl_up_sync(unsigned, X value, int by, int width = 32) {
    const int lane = emulator::current % 32;
    return emulator::from_lane(value, lane % width < by ? lane : lane - by);
}
inline int __syncthreads_or(int set) {
    static int any, readers;
    __syncthreads();
    if (!readers) any = 0;
    any |= set, ++readers;
    __syncthreads();
    --readers;
    return any;
}
inline float __fadd_rn(float a, float b) { return a + b; }
inline float __fmul_rn(float a, float b) { return a * b; }
inline float __fmaf_rn(float a, float b, float c) { return fmaf(a, b, c); }
inline float rsqrtf(float x) { return 1.0f / sqrtf(x); }
inline int __popc(uint32_t x) { return __builtin_popcount(x); }
template <class X, class Y>
X atomicAdd(X* to, Y value) {
    const X before = *to;
    *to += value;
    return before;
}
template <class X, class Y>
X atomicOr(X* to, Y value) {
    const X before = *to;
    *to |= value;
    return before;
}
inline uint32_t __reduce_max_sync(unsigned, uint32_t value) {
    uint32_t most = 0;
    for (int i = 0; i < emulator::WARP; ++i) most = max(most, emulator::from_lane(value, i));
    return most;
}
inline unsigned __dp4a(unsigned a, unsigned b, unsigned sum) {
    for (int i = 0; i < 32; i += 8) sum += (a >> i & 0xff) * (b >> i & 0xff);
    return sum;
}
inline const void* __cvta_generic_to_global(const void* p) { return p; }
inline uint64_t __cvta_generic_to_shared(const void* p) {
    return uint64_t(static_cast<const unsigned char*>(p) - emulator::shared_memory);
}
