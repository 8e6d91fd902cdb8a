/* One source, several instruction sets: a function marked MINIDL_CLONES is compiled for baseline x86-64, for AVX2 with
 * FMA and for AVX-512, and the dynamic linker picks one at start-up. So wheels built without -march are fast as well.
 * Compilers, libraries and processors that lack the mechanism compile the one plain version.
 */
#ifndef MINIDL_SIMD_H
#define MINIDL_SIMD_H

#include <stddef.h>
#include <stdint.h>
#include <stdlib.h> /* defines __GLIBC__ */

#if defined(__x86_64__) && defined(__ELF__) && defined(__GLIBC__) && !defined(__clang__) && __GNUC__ >= 12
#define MINIDL_CLONES __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
/* What only AVX-512's intrinsics can say, to be called where MINIDL_HAS_AVX512. */
#define MINIDL_AVX512 __attribute__((target("arch=x86-64-v4")))
#define MINIDL_HAS_AVX512 (__builtin_cpu_supports("x86-64-v4") != 0)
#else
#define MINIDL_CLONES
#define MINIDL_HAS_AVX512 0
#endif

#if defined(__GNUC__)
/* Bodies shared by several variants take their options as constants and must be inlined for these to fold away. */
#define MINIDL_INLINE static inline __attribute__((always_inline))
#define RESTRICT __restrict__
#else
#define MINIDL_INLINE static inline
#define RESTRICT __restrict
#endif

#endif
