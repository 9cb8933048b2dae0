/* Many pieces of memory, of a file, or many small files by one call each.
 *
 * A call of Python for each costs more than a kilobyte that it copies, and gives the interpreter's
 * lock up and waits for it again. Nothing of Python is in here: it is called by its address,
 * without that lock. Callers have checked that every range lies in its memory.
 */
#include <errno.h>
#include <fcntl.h>
#include <stdint.h>
#include <string.h>
#include <unistd.h>

/* Of another meaning of the arguments the number is another one: an older library may lie there. */
void hpstore_copy_ranges_1(
    const uint64_t *to, const uint64_t *from, const int64_t *lengths, int64_t count)
{
    for (int64_t i = 0; i < count; i++)
        memcpy((void *)(uintptr_t)to[i], (const void *)(uintptr_t)from[i], lengths[i]);
}

/* How many bytes there are, up to so many, or -errno. Not asked again once `enough` are there. */
static int64_t read_at(int file, char *to, int64_t bytes, int64_t offset, int64_t enough)
{
    int64_t done = 0;
    while (done < enough) {
        ssize_t got = pread(file, to + done, bytes - done, offset + done);
        if (got < 0 && errno == EINTR)
            continue;
        if (got < 0)
            return -errno;
        if (got == 0)
            break;
        done += got;
    }
    return done;
}

void hpstore_read_ranges_1(int file, const int64_t *offsets, const int64_t *lengths,
    const uint64_t *to, int64_t *got, int64_t count)
{
    for (int64_t i = 0; i < count; i++)
        got[i] = read_at(file, (char *)(uintptr_t)to[i], lengths[i], offsets[i], lengths[i]);
}

/* `paths`: each with a zero behind it, the i-th from its byte `begins[i]` on. One byte less than
 * its room is a whole file: the last byte shows one that has grown. */
void hpstore_read_files_1(const char *paths, const int64_t *begins, const int64_t *rooms,
    const uint64_t *to, int64_t *got, int64_t count)
{
    for (int64_t i = 0; i < count; i++) {
        int file;
        do
            file = open(paths + begins[i], O_RDONLY | O_CLOEXEC | O_NONBLOCK); /* a FIFO, too */
        while (file < 0 && errno == EINTR);
        if (file < 0) {
            got[i] = -errno;
            continue;
        }
        got[i] = read_at(file, (char *)(uintptr_t)to[i], rooms[i], 0, rooms[i] - 1);
        close(file);
    }
}

/* Whether the markers of a JPEG lead to its end-of-image marker. Of no use before two bytes. */
static int jpeg_ends(const uint8_t *data, int64_t bytes)
{
    int64_t at = 2;
    while (at + 1 < bytes) {
        const uint8_t *found = memchr(data + at, 0xff, bytes - 1 - at);
        if (!found)
            return 0;
        uint8_t marker = found[1];
        at = found - data + 1;
        if (marker <= 0x01 || (marker >= 0xd0 && marker <= 0xd8) || marker == 0xff)
            continue; /* stuffing, restart, start, fill */
        if (marker == 0xd9)
            return 1;
        if (at + 3 > bytes)
            return 0;
        int64_t size = (int64_t)data[at + 1] << 8 | data[at + 2];
        at += 1 + (size > 2 ? size : 2);
    }
    return 0;
}

void hpstore_jpegs_end_1(
    const uint64_t *from, const int64_t *lengths, uint8_t *ends, int64_t count)
{
    for (int64_t i = 0; i < count; i++)
        ends[i] = jpeg_ends((const uint8_t *)(uintptr_t)from[i], lengths[i]);
}

/* Numbers of up to 18 digits, with a minus or a line's end: `values`; or 0 in `plain` for others. */
void hpstore_decimals_1(const uint64_t *from, const int64_t *lengths, int64_t *values,
    uint8_t *plain, int64_t count)
{
    for (int64_t i = 0; i < count; i++) {
        const uint8_t *at = (const uint8_t *)(uintptr_t)from[i], *end = at + lengths[i];
        int minus = at < end && *at == '-';
        at += minus;
        if (at < end && end[-1] == '\n')
            end--;
        int64_t value = 0;
        plain[i] = at < end && end - at <= 18;
        for (; plain[i] && at < end; at++) {
            plain[i] = *at >= '0' && *at <= '9';
            value = 10 * value + (*at - '0');
        }
        values[i] = minus ? -value : value;
    }
}
