/* Headers and names of a tar, many at a time: see many_ranges.c for how this is called.
 *
 * What is in doubt ends a run, for Python to look at: it alone decides what is wrong with a tar.
 */
#include <stdint.h>
#include <string.h>

enum { BLOCK = 512, NAME = 100, SIZE = 124, CHECKSUM = 148, KIND = 156, PREFIX = 345 };

/* A number of `digits` octal digits, or -1. */
static int64_t octal(const uint8_t *at, int digits)
{
    int64_t value = 0;
    for (int i = 0; i < digits; i++) {
        if (at[i] < '0' || at[i] > '7')
            return -1;
        value = value << 3 | (at[i] - '0');
    }
    return value;
}

/* Bytes of the file that a header is of; -1 where it is not plainly one of an ordinary file, with
 * the checksum that it says. A name that ends with a slash is a folder in the oldest tars. */
static int64_t plain_size(const uint8_t *block, int64_t *name_bytes)
{
    if (!block[0] || block[PREFIX] || (block[KIND] && block[KIND] != '0'))
        return -1;
    if (block[SIZE + 11] && block[SIZE + 11] != ' ')
        return -1;
    uint32_t sum = 8 * ' '; /* of few bits: the loop is four times as fast as with 64 */
    for (int i = 0; i < BLOCK; i++)
        sum += block[i];
    for (int i = CHECKSUM; i < CHECKSUM + 8; i++)
        sum -= block[i];
    if (block[CHECKSUM + 6] || octal(block + CHECKSUM, 6) != sum)
        return -1;
    const uint8_t *end = memchr(block, 0, NAME);
    *name_bytes = end ? end - block : NAME;
    if (!block[KIND] && block[*name_bytes - 1] == '/')
        return -1;
    return octal(block + SIZE, 11);
}

/* Keywords of pax headers that say nothing of where a file lies or what it is called. */
static const char *const aside[] = {"mtime", "atime", "ctime", "uid", "gid", "uname", "gname"};

static int is_aside(const uint8_t *keyword, int64_t bytes)
{
    for (unsigned i = 0; i < sizeof aside / sizeof *aside; i++)
        if (strlen(aside[i]) == (size_t)bytes && !memcmp(aside[i], keyword, bytes))
            return 1;
    return 0;
}

/* Bytes of a pax header and its records, of which each is plainly one of `aside`; else 0. Writers
 * of tars put one in front of each file whose time has a fraction. */
static int64_t pax_aside(const uint8_t *block, int64_t bytes)
{
    if (bytes < BLOCK || block[KIND] != 'x')
        return 0;
    uint32_t sum = 8 * ' ';
    for (int i = 0; i < BLOCK; i++)
        sum += block[i];
    for (int i = CHECKSUM; i < CHECKSUM + 8; i++)
        sum -= block[i];
    int64_t size = octal(block + SIZE, 11), padded = (size + BLOCK - 1) / BLOCK * BLOCK;
    if (block[CHECKSUM + 6] || octal(block + CHECKSUM, 6) != sum || block[SIZE + 11])
        return 0;
    if (size < 0 || padded > 2 * BLOCK || padded > bytes - BLOCK)
        return 0;
    const uint8_t *at = block + BLOCK, *end = at + size;
    while (at < end) { /* "30 mtime=1700000000.123456789\n" */
        int64_t length = 0, digits = 0;
        while (at + digits < end && digits < 4 && at[digits] >= '0' && at[digits] <= '9')
            length = 10 * length + (at[digits++] - '0');
        if (!digits || length <= digits + 1 || length > end - at)
            return 0;
        const uint8_t *keyword = at + digits + 1, *last = at + length - 1;
        const uint8_t *equals = memchr(keyword, '=', last - keyword);
        if (at[digits] != ' ' || *last != '\n' || !equals || !is_aside(keyword, equals - keyword))
            return 0;
        at += length;
    }
    return BLOCK + padded;
}

/* Headers of ordinary files, one behind another, that lie whole in `data`, the first at its byte
 * `first`, each perhaps with a pax header before it that says nothing of them: where each is, how
 * long its file is, and its name with a zero behind it, of at most 101 bytes. Returns how many;
 * `reached`: where the next header is, and how many bytes names are. */
int64_t hpstore_tar_headers_2(const uint8_t *data, int64_t bytes, int64_t first, int64_t most,
    int64_t *headers, int64_t *sizes, uint8_t *names, int64_t *reached)
{
    int64_t count = 0, at = first, name_bytes, used = 0;
    while (count < most && at < bytes) {
        int64_t header = at + pax_aside(data + at, bytes - at);
        int64_t size = header > bytes - BLOCK ? -1 : plain_size(data + header, &name_bytes);
        if (size < 0)
            break;
        headers[count] = header;
        sizes[count++] = size;
        memcpy(names + used, data + header, name_bytes);
        used += name_bytes;
        names[used++] = 0;
        at = header + BLOCK + (size + BLOCK - 1) / BLOCK * BLOCK;
    }
    reached[0] = at;
    reached[1] = used;
    return count;
}

/* Bytes of the sample's key in the name of a file, and where its ending begins; -1 for a name that
 * is none of a record, or not plainly one. */
static int64_t key_bytes(const uint8_t *name, int64_t bytes, int64_t *ending)
{
    int64_t base = 0, dot = -1;
    for (int64_t i = 0; i < bytes; i++) {
        if (name[i] == '\n')
            return -1;
        if (name[i] == '/') {
            base = i + 1;
            dot = -1;
        } else if (name[i] == '.' && dot < 0) {
            dot = i;
        }
    }
    if (dot <= base || dot == bytes - 1 || (name[0] == '_' && name[1] == '_'))
        return -1;
    for (int64_t i = dot + 1; i < bytes; i++)
        if (name[i] >= 0x80)
            return -1;
    *ending = dot + 1;
    return dot;
}

static int is_ending(const uint8_t *name, int64_t bytes, const uint8_t *ending)
{
    for (int64_t i = 0; i < bytes; i++) {
        uint8_t small = name[i] >= 'A' && name[i] <= 'Z' ? name[i] + 32 : name[i];
        if (small != ending[i])
            return 0;
    }
    return !ending[bytes];
}

enum { ENDING = 101 }; /* bytes of a known ending with zeros behind it */

/* Samples of files by their names, each with a zero behind it. `known`: `known_count` endings, of
 * the numbers `known_numbers`. `last`: the key before the first, of `last_bytes`, or -1. `seen`, by
 * number: 0 for endings that this one has already, else -1. Finds the number of each ending,
 * which files begin a sample, and the keys of these; `reached`: bytes of names that were taken.
 * Returns how many files it took: up to one of which something is in doubt, its ending is not
 * known, or its sample has one already. */
int64_t hpstore_tar_samples_1(const uint8_t *names, int64_t count, const uint8_t *known,
    const int64_t *known_numbers, int64_t known_count, const uint8_t *last, int64_t last_bytes,
    int64_t *seen, uint16_t *numbers, uint8_t *fresh, uint8_t *keys, int64_t *key_ends,
    int64_t *reached)
{
    int64_t at = 0, sample = 0, used = 0, guess = 0, i;
    for (i = 0; i < count; i++) {
        const uint8_t *name = names + at;
        int64_t bytes = strlen((const char *)name), ending;
        int64_t key = key_bytes(name, bytes, &ending), tries = 0;
        if (key < 0)
            break;
        while (tries < known_count
            && !is_ending(name + ending, bytes - ending, known + ENDING * guess)) {
            guess = guess + 1 < known_count ? guess + 1 : 0;
            tries++;
        }
        if (tries == known_count)
            break;
        int64_t number = known_numbers[guess];
        int begins = key != last_bytes || memcmp(name, last, key);
        if (!begins && seen[number] == sample)
            break;
        if (begins) {
            memcpy(keys + used, name, key);
            used += key;
            key_ends[sample++] = used;
        }
        seen[number] = sample;
        numbers[i] = (uint16_t)number;
        fresh[i] = (uint8_t)begins;
        last = name;
        last_bytes = key;
        at += bytes + 1;
        guess = guess + 1 < known_count ? guess + 1 : 0;
    }
    *reached = at;
    return i;
}

/* Whether keys, between the `count` + 1 `ends` in `keys`, become greater: longer, or of the same length and
 * later in the order of their bytes. Then no two are the same. */
int64_t hpstore_keys_ascend_1(const uint8_t *keys, const int64_t *ends, int64_t count)
{
    for (int64_t i = 1; i < count; i++) {
        int64_t before = ends[i] - ends[i - 1], bytes = ends[i + 1] - ends[i];
        if (bytes < before || (bytes == before
                && memcmp(keys + ends[i - 1], keys + ends[i], bytes) >= 0))
            return 0;
    }
    return 1;
}
