/* Directories of caches that hold no data: which blocks each of several policies would keep.
 *
 * The same rules, step by step, as the classes of plain_queues.py and plain_adaptive.py in Python and
 * of tests/unit/counted_policies.py: a property test compares them. Blocks are numbered from 0, all of
 * one size. Nothing of Python is in here: directories.c is called by its address, without the
 * interpreter's lock, by one thread at a time. Lists of blocks and marks stand here, to be inlined;
 * rules of lists in queue_rules.c, those that adapt in adaptive_rules.c, those that count or look
 * at epochs in counted_rules.c.
 */
#ifndef HPSTORE_DIRECTORIES_H
#define HPSTORE_DIRECTORIES_H

#include <stdint.h>
#include <stdlib.h>

#pragma GCC visibility push(hidden) /* but for directories.c: no other library's "count" is called */

/* of policies: the bit in masks; the order is that of KINDS in directories.py */
enum { LRU, LFU, ARC, LIRS, S3_FIFO, SIEVE, TINY_LFU, TWO_QUEUE, COUNT, FRESH, STATIC, PHASE };

/* Doubly linked lists of blocks; list h has its two ends at number blocks + h. */
typedef struct {
    int32_t *older, *newer, length[4], blocks;
} lists;

/* Blocks by rising key. */
typedef struct {
    int32_t *order, *place, length;
    double *key;
} heap;

typedef struct {
    int kind, bit, evicted;
    int32_t blocks, capacity, hand, limit[4], close;
    lists queue, second;
    heap counts;
    uint8_t *state, *hits;
    double target, margin;
    int64_t made;
    uint32_t draws;
    double weight, growth; /* of FRESH: of a request now, and by how much more than the one before */
    /* of PHASE: bits of blocks, and when each pattern of bits is needed */
    const uint8_t *seen;
    const float *waits;
    const int32_t *names;
} directory;

typedef struct {
    int count, watched;
    int64_t room, gone;
    int32_t blocks, *left;
    uint16_t *masks;
    directory *all;
} panel;

static inline void add(lists *l, int h, int32_t block)
{
    int32_t end = l->blocks + h, newest = l->older[end];
    l->older[end] = block, l->newer[newest] = block;
    l->older[block] = newest, l->newer[block] = end;
    l->length[h]++;
}

static inline void cut(lists *l, int h, int32_t block)
{
    int32_t older = l->older[block], newer = l->newer[block];
    l->newer[older] = newer, l->older[newer] = older;
    l->length[h]--;
}

static inline int32_t oldest(const lists *l, int h) { return l->newer[l->blocks + h]; }

static inline int32_t take_oldest(lists *l, int h)
{
    int32_t block = oldest(l, h);
    cut(l, h, block);
    return block;
}

static inline void renew(lists *l, int h, int32_t block)
{
    cut(l, h, block);
    add(l, h, block);
}

static inline void enter(panel *p, const directory *d, int32_t b) { p->masks[b] |= 1u << d->bit; }

static inline void leave(panel *p, const directory *d, int32_t b)
{
    p->masks[b] &= ~(1u << d->bit);
    if (d->bit == p->watched && p->gone < p->room)
        p->left[p->gone++] = b;
}

/* A request of block b: 1 where the directory has it. What it lets in and gives up is in p->masks. */
int lru(panel *p, directory *d, int32_t b);
int lfu(panel *p, directory *d, int32_t b);
int arc(panel *p, directory *d, int32_t b);
int lirs(panel *p, directory *d, int32_t b);
int s3_fifo(panel *p, directory *d, int32_t b);
int sieve(panel *p, directory *d, int32_t b);
int tiny_lfu(panel *p, directory *d, int32_t b);
int two_queue(panel *p, directory *d, int32_t b);
int count(panel *p, directory *d, int32_t b);
int fresh_count(panel *p, directory *d, int32_t b);
int fixed(panel *p, directory *d, int32_t b);
int phase(panel *p, directory *d, int32_t b);

#pragma GCC visibility pop
#endif
