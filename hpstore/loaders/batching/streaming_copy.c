/* Pieces of memory, one after another, into one place, by stores that pass the caches by.
 *
 * An ordinary store reads the line that it writes into the cache first, and something else has to
 * leave for it: three transfers a byte copied, where two are enough for what nobody reads soon.
 *
 * Nothing of Python is in here: it is called by its address, without the interpreter's lock.
 */
#include <stdint.h>
#include <string.h>

#if defined(__x86_64__)
#include <immintrin.h>

enum { LINE = 64, BLOCK = 4 * LINE, AHEAD = 1024 };

typedef void copy_blocks(char *to, const char *from, int64_t bytes);

/* `to` begins a line, `bytes` are whole blocks. What is read is not kept either. */
#define COPY_BLOCKS(NAME, TARGET, VECTOR, LOAD, STORE)                                            \
    __attribute__((target(TARGET))) static void NAME(char *to, const char *from, int64_t bytes)   \
    {                                                                                             \
        enum { COUNT = BLOCK / sizeof(VECTOR) };                                                  \
        for (const char *end = from + bytes; from < end; from += BLOCK, to += BLOCK) {            \
            VECTOR part[COUNT];                                                                   \
            for (int i = 0; i < BLOCK / LINE; i++)                                                \
                _mm_prefetch(from + AHEAD + i * LINE, _MM_HINT_NTA);                              \
            for (int i = 0; i < COUNT; i++)                                                       \
                part[i] = LOAD((const void *)(from + i * sizeof(VECTOR)));                        \
            for (int i = 0; i < COUNT; i++)                                                       \
                STORE((void *)(to + i * sizeof(VECTOR)), part[i]);                                \
        }                                                                                         \
    }

COPY_BLOCKS(by_32_bytes, "avx2", __m256i, _mm256_loadu_si256, _mm256_stream_si256)
COPY_BLOCKS(by_64_bytes, "avx512f", __m512i, _mm512_loadu_si512, _mm512_stream_si512)

static void copy_piece(copy_blocks *blocks, char *to, const char *from, int64_t bytes)
{
    int64_t head = -(uintptr_t)to & (LINE - 1);
    if (head > bytes)
        head = bytes;
    int64_t whole = (bytes - head) & ~(int64_t)(BLOCK - 1);
    memcpy(to, from, head);
    blocks(to + head, from + head, whole);
    memcpy(to + head + whole, from + head + whole, bytes - head - whole);
}

/* The widest stores that this processor has, in bytes. */
int hpstore_width(void)
{
    if (__builtin_cpu_supports("avx512f"))
        return 64;
    return __builtin_cpu_supports("avx2") ? 32 : 0;
}

/* Of another meaning of the arguments the number is another one: an older library may lie there.
 * `width`: of the stores, no more than hpstore_width(). */
void hpstore_join_1(
    char *to, const uint64_t *pieces, const int64_t *lengths, int64_t count, int width)
{
    copy_blocks *blocks = width == 64 ? by_64_bytes : by_32_bytes;
    for (int64_t i = 0; i < count; to += lengths[i++])
        copy_piece(blocks, to, (const char *)(uintptr_t)pieces[i], lengths[i]);
    _mm_sfence(); /* whoever is told that the copy is done sees all of it */
}
#else
#error "stores that pass the cache by are written for x86-64 alone; without them torch copies"
#endif
