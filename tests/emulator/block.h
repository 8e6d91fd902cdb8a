// A block of threads on a CPU: each is a fiber of one thread, and they take turns where they wait. Warps run in a random
// order, one of them late for a while, so that all others come to wait for it; copies of the engine come in any order.
// A kernel that waits for ever, or reads by the engine what a thread has written without a fence, is told of.
//
// What is in shared memory by name, not by address, is static in C++.
#pragma once
#include <ucontext.h>

#include <cmath>
#include <cstdarg>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <random>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

#define __device__
#define __forceinline__ inline
#define __restrict__
#define __global__
#define __grid_constant__
#define __launch_bounds__(...)
#define __cluster_dims__(...)
#define __align__(bytes) __attribute__((aligned(bytes)))
#define __shared__ static

struct uint2 { uint32_t x, y; };
struct alignas(16) uint4 { uint32_t x, y, z, w; };
struct float2 { float x, y; };
struct alignas(16) float4 { float x, y, z, w; };
inline uint2 make_uint2(uint32_t x, uint32_t y) { return {x, y}; }
inline uint4 make_uint4(uint32_t x, uint32_t y, uint32_t z, uint32_t w) { return {x, y, z, w}; }
inline float2 make_float2(float x, float y) { return {x, y}; }
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }

template <class To, class From>
To bits_as(From from) {
    static_assert(sizeof(To) == sizeof(From), "as many bits");
    To to;
    memcpy(&to, &from, sizeof to);
    return to;
}
inline float __uint_as_float(uint32_t x) { return bits_as<float>(x); }
inline float __int_as_float(int32_t x) { return bits_as<float>(x); }
inline uint32_t __float_as_uint(float x) { return bits_as<uint32_t>(x); }
inline uint32_t __byte_perm(uint32_t low, uint32_t high, uint32_t which) {
    const uint64_t bytes = uint64_t(high) << 32 | low;
    uint32_t out = 0;
    for (int i = 0; i < 4; ++i) out |= uint32_t(bytes >> 8 * (which >> 4 * i & 7) & 0xff) << 8 * i;
    return out;
}
inline int __ffs(uint32_t x) { return __builtin_ffs(int(x)); }
template <class X> X __ldg(const X* from) { return *from; }
template <class X> X min(X a, X b) { return b < a ? b : a; }
template <class X> X max(X a, X b) { return a < b ? b : a; }

namespace emulator {

constexpr int MOST_THREADS = 1024, WARP = 32, SHARED = 227 * 1024, STACK = 256 * 1024, PATIENCE = 3000;

struct Product {  // of a warpgroup, as a thread has to take its part in it
    float* sum;
    uint64_t a, b;  // operands in shared memory
    int values;
    bool keep, a_across, b_across, a_held;
    uint32_t held[4][4];  // the first operand's rows of this thread, where it is in registers of four
};
using Work = std::function<void()>;

struct Fiber {
    ucontext_t context;
    std::unique_ptr<char[]> stack;  // of which only what is touched takes memory
    bool done;
    std::deque<std::vector<Product>> products;  // groups; the last is open
    std::deque<std::vector<Work>> stores;       // likewise
    std::deque<std::vector<Work>> loads;        // likewise
    std::vector<uint32_t> written;              // places in shared memory without a fence since
    uint32_t slot[8];                           // what others of the warp may read
};
struct Barrier {
    int count, left;
    int64_t bytes;
    uint32_t phase;
};
struct Failed {};
struct Meeting {
    int here;
    uint32_t turn;
};

inline Fiber fibers[MOST_THREADS];
inline ucontext_t scheduler;
inline int threads, current, shared_bytes;
inline unsigned block, sizes[5];  // of the grid, of a block
inline std::mt19937 random_numbers;
inline std::map<uint32_t, Barrier> barriers;
inline std::map<int, Meeting> meetings;  // of warps, then of named barriers
inline std::vector<Work> copies;         // on their way
inline std::vector<Work> slow;           // those of them that come when nothing goes on without
inline bool unfenced[SHARED];
inline int64_t progress;
inline bool between;  // the fibers' turns, where the scheduler itself is at work
inline char failure[1024];
inline Work body;

template <class X>
std::vector<X>& open_group(std::deque<std::vector<X>>& groups) {
    if (groups.empty()) groups.emplace_back();
    return groups.back();
}
inline void pause() { swapcontext(&fibers[current].context, &scheduler); }

[[noreturn]] inline void fail(const char* text, ...) {
    if (!failure[0]) {
        va_list values;
        va_start(values, text);
        const int length = snprintf(failure, sizeof failure, "block %u, thread %d: ", block, current);
        vsnprintf(failure + length, sizeof failure - length, text, values);
        va_end(values);
    }
    if (between) throw Failed();
    for (;;) pause();  // the scheduler does not come back
}

// Waits for as many threads as count() says, when it is asked: those that have ended are not waited for.
template <class Count>
void meet(int id, Count count) {
    Meeting& meeting = meetings[id];
    const uint32_t turn = meeting.turn;
    for (++meeting.here; meeting.turn == turn; pause())
        if (meeting.here == count()) {
            meeting.here = 0, ++meeting.turn, ++progress;
            return;
        }
}
inline int running(int first, int last) {
    int count = 0;
    for (int i = first; i < min(last, threads); ++i) count += !fibers[i].done;
    return count;
}
inline void meet_warp() {
    const int first = current / WARP * WARP;
    meet(current / WARP, [=] { return running(first, first + WARP); });
}
inline void meet_named(int id, int count) { meet(MOST_THREADS + id, [=] { return count; }); }
inline void meet_block() { meet(MOST_THREADS, [] { return running(0, threads); }); }
inline Fiber& lane(int i) { return fibers[current / WARP * WARP + i]; }

alignas(1024) inline unsigned char shared_memory[SHARED];

template <class X>
X* place(uint32_t address) {
    if (address % sizeof(X)) fail("an access of %d bytes at %u", int(sizeof(X)), address);
    if (address + sizeof(X) > uint32_t(shared_bytes)) fail("shared memory ends before %u", address);
    return reinterpret_cast<X*>(shared_memory + address);
}
template <class X>
X read(uint32_t address) { return *place<X>(address); }
template <class X>
void write(uint32_t address, X value) {
    *place<X>(address) = value;
    for (uint32_t i = 0; i < sizeof(X); ++i) unfenced[address + i] = true, fibers[current].written.push_back(address + i);
}
template <class X = uint16_t>
X read_by_engine(uint32_t address) {
    if (unfenced[address]) fail("the engine reads at %u what a thread wrote without a fence", address);
    return read<X>(address);
}
inline uint32_t swizzled(uint32_t address) { return address ^ (address >> 7 & 7) << 4; }
inline float from_bf16(uint16_t bits) { return bits_as<float>(uint32_t(bits) << 16); }
inline uint16_t to_bf16(float x) {
    const uint32_t bits = bits_as<uint32_t>(x);
    return x != x ? 0x7fff : (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
}
inline float from_f16(uint16_t bits) {
    const int exponent = bits >> 10 & 31;
    const float fraction = float(bits & 0x3ff);
    const float size = exponent == 31 ? (fraction ? NAN : INFINITY)
                                      : ldexpf(exponent ? fraction + 1024 : fraction, max(exponent, 1) - 25);
    return bits >> 15 ? -size : size;
}
inline uint16_t to_f16(float x) {
    const uint32_t bits = bits_as<uint32_t>(x), size = bits & 0x7fffffff, sign = bits >> 16 & 0x8000;
    if (x != x) return 0x7fff;
    if (size >= 0x477ff000) return sign | 0x7c00;                                   // 65520 and more
    if (size < 0x38800000) return sign | uint32_t(nearbyintf(fabsf(x) * 0x1p24f));  // below 2^-14
    return sign | ((size + 0xfff + (size >> 13 & 1)) >> 13) - (112 << 10);
}

// ---- barriers

inline Barrier& at(uint32_t address) {
    const auto found = barriers.find(address);
    if (found == barriers.end()) fail("there is no barrier at %u", address);
    return found->second;
}
inline void settle(Barrier& barrier) {
    if (barrier.left < 0) fail("more arrive at a barrier than it counts");
    if (barrier.left || barrier.bytes) return;
    barrier.left = barrier.count, barrier.phase ^= 1, ++progress;
}
inline void barrier_init(uint32_t address, int count) {
    read<uint64_t>(address);
    barriers[address] = {count, count, 0, 0};
}
inline void barrier_arrive(uint32_t address) {
    Barrier& barrier = at(address);
    --barrier.left;
    settle(barrier);
}
inline void barrier_expect(uint32_t address, int bytes) {
    at(address).bytes += bytes;
    barrier_arrive(address);
}
inline void barrier_wait(uint32_t address, uint32_t parity) {
    Barrier& barrier = at(address);
    while (barrier.phase == parity) pause();
}
inline void named_sync(int id, int count) { meet_named(id, count); }
inline void fence() {
    for (uint32_t i : fibers[current].written) unfenced[i] = false;
    fibers[current].written.clear();
}
inline void nothing(...) {}

// ---- blocks

inline void enter() {
    body();
    Fiber& mine = fibers[current];
    mine.done = true, ++progress;
    for (size_t i = 0; i < mine.stores.size(); ++i)
        if (!mine.stores[i].empty()) fail("ends before the engine has read what it is to store");
    for (;;) pause();
}

inline void start_block() {
    barriers.clear(), meetings.clear(), copies.clear(), slow.clear();
    memset(shared_memory, 0xff, sizeof shared_memory);  // NaN
    memset(unfenced, 0, sizeof unfenced);
    for (int i = 0; i < threads; ++i) {
        Fiber& fiber = fibers[i];
        fiber.done = false, fiber.products.clear(), fiber.stores.clear();
        fiber.loads.clear(), fiber.written.clear();
        getcontext(&fiber.context);
        if (!fiber.stack) fiber.stack.reset(new char[STACK]);
        fiber.context.uc_stack.ss_sp = fiber.stack.get(), fiber.context.uc_stack.ss_size = STACK;
        fiber.context.uc_link = nullptr;
        makecontext(&fiber.context, enter, 0);
    }
}

// Lets one of these copies come.
inline void come(std::vector<Work>& some) {
    const size_t i = random_numbers() % some.size();
    const Work copy = some[i];
    some.erase(some.begin() + int64_t(i));
    between = true;
    try {
        copy(), ++progress;
    } catch (Failed) {
    }
    between = false;
}

// Goes round the warps, one of which is late for a while so that all others wait for it, and lets copies come, now and
// then, a few of them not before everybody waits.
inline void run_block() {
    start_block();
    const int warps = (threads + WARP - 1) / WARP;
    unsigned late = 0;
    int64_t last = -1;
    for (int idle = 0, left = threads; left && !failure[0];) {
        left = 0;
        if (random_numbers() % 16 == 0) late = random_numbers() % (warps + 1);
        for (int i = 0, first = int(random_numbers() % warps) * WARP; i < threads && !failure[0]; ++i) {
            const int next = (first + i) % threads;
            if (fibers[next].done) continue;
            ++left;
            if (unsigned(next / WARP) == late) continue;
            current = next;
            swapcontext(&scheduler, &fibers[next].context);
        }
        while (!copies.empty() && random_numbers() % 3) {
            if (random_numbers() % 8) {
                come(copies);
            } else {
                slow.push_back(copies.back());
                copies.pop_back();
            }
        }
        idle = progress == last ? idle + 1 : 0, last = progress;
        if (idle > 20 && !slow.empty()) come(slow);
        if (idle > PATIENCE) {
            int said = snprintf(failure, sizeof failure, "block %u: %d threads wait for ever", block, left);
            for (const auto& [address, barrier] : barriers)  // of which some are waited for
                said += snprintf(failure + said, max(0, int(sizeof failure) - said), "; %d, %d bytes at %u", barrier.left,
                                 int(barrier.bytes), address);
        }
    }
}

struct Place3 { unsigned x, y, z; };
inline Place3 of_thread() { return {current % sizes[3], current / sizes[3], 0}; }
inline Place3 of_block() { return {block % sizes[0], block / sizes[0] % sizes[1], block / sizes[0] / sizes[1]}; }

template <class X>
X argument(const void* from) {
    std::remove_const_t<X> value;
    memcpy(&value, from, sizeof value);
    return value;
}
template <class... A, size_t... I>
void call(void (*kernel)(A...), void** arguments, std::index_sequence<I...>) {
    kernel(argument<A>(arguments[I])...);
}

template <class... A>
int launch(void (*kernel)(A...), const unsigned* shape, int bytes, unsigned seed, void** arguments, char* told) {
    memcpy(sizes, shape, sizeof sizes);
    threads = int(sizes[3] * sizes[4]), shared_bytes = bytes, failure[0] = 0;
    random_numbers.seed(seed);
    body = [=] { call(kernel, arguments, std::index_sequence_for<A...>()); };
    for (block = 0; block < sizes[0] * sizes[1] * sizes[2] && !failure[0]; ++block) run_block();
    strcpy(told, failure);
    return failure[0] != 0;
}

template <class X>
X from_lane(X value, int from) {
    memcpy(fibers[current].slot, &value, sizeof value);
    meet_warp();
    memcpy(&value, lane(from).slot, sizeof value);
    meet_warp();
    return value;
}

}  // namespace emulator
