/* Begins, asks and ends directories of several rules over the same blocks; see directories.h. */
#include "directories.h"

#include <math.h>
#include <string.h>

#define FADING .5 /* of FRESH: in so many passes over all blocks a count fades to half */

static int lists_begin(lists *l, int32_t blocks)
{
    size_t size = sizeof(int32_t) * ((size_t)blocks + 4);
    l->older = malloc(size), l->newer = malloc(size), l->blocks = blocks;
    if (!l->older || !l->newer)
        return 0;
    for (int h = 0; h < 4; h++)
        l->older[blocks + h] = l->newer[blocks + h] = blocks + h;
    return 1;
}

static int request(panel *p, directory *d, int32_t b)
{
    switch (d->kind) {
    case LRU: return lru(p, d, b);
    case LFU: return lfu(p, d, b);
    case ARC: return arc(p, d, b);
    case LIRS: return lirs(p, d, b);
    case S3_FIFO: return s3_fifo(p, d, b);
    case SIEVE: return sieve(p, d, b);
    case TINY_LFU: return tiny_lfu(p, d, b);
    case TWO_QUEUE: return two_queue(p, d, b);
    case COUNT: return count(p, d, b);
    case FRESH: return fresh_count(p, d, b);
    case STATIC: return fixed(p, d, b);
    default: return phase(p, d, b);
    }
}

static int32_t at_least_one(int32_t value) { return value < 1 ? 1 : value; }

static int begin(directory *d)
{
    int32_t n = d->blocks, room = d->capacity;
    int counted = d->kind == LFU || d->kind == COUNT || d->kind == FRESH || d->kind == PHASE;
    d->hand = n;
    d->state = calloc(counted ? 1 : n, 1);
    d->hits = calloc(d->kind == S3_FIFO || d->kind == TINY_LFU ? n : 1, 1);
    if (!d->state || !d->hits)
        return 0;
    if (d->kind == TWO_QUEUE)
        d->limit[0] = at_least_one(room / 4), d->limit[1] = room / 2;
    if (d->kind == LIRS)
        d->limit[0] = room - at_least_one(room / 100);
    if (d->kind == S3_FIFO) {
        d->limit[0] = at_least_one(room / 10);
        d->limit[1] = room - d->limit[0], d->limit[2] = (int32_t)((int64_t)room * 9 / 10);
    }
    if (d->kind == TINY_LFU) {
        d->limit[0] = at_least_one(room / 100), d->limit[1] = room - d->limit[0];
        d->limit[2] = (int32_t)((int64_t)d->limit[1] * 8 / 10);
    }
    if (!counted)
        return d->kind == STATIC
            || (lists_begin(&d->queue, n) && (d->kind != LIRS || lists_begin(&d->second, n)));
    heap *h = &d->counts;
    h->order = malloc(sizeof(int32_t) * (size_t)room), h->place = malloc(sizeof(int32_t) * (size_t)n);
    h->key = calloc(d->kind == PHASE ? 1 : n, sizeof(double));
    if (!h->order || !h->place || !h->key)
        return 0;
    memset(h->place, 255, sizeof(int32_t) * (size_t)n);
    return 1;
}

void hpstore_directories_free_3(panel *p)
{
    for (int i = 0; p && i < p->count; i++) {
        directory *d = &p->all[i];
        free(d->state), free(d->hits);
        free(d->queue.older), free(d->queue.newer), free(d->second.older), free(d->second.newer);
        free(d->counts.order), free(d->counts.place), free(d->counts.key);
    }
    if (p)
        free(p->all);
    free(p);
}

/* `kinds`: of each of `count` <= 16 directories. `margin`, ln: by what a newcomer must be better, of
 * COUNT and PHASE. `masks` (blocks), `seen`, `waits` (256) and `names` (blocks, or NULL) stay the
 * caller's and must outlive it. NULL without memory. */
panel *hpstore_directories_begin_3(int count, int32_t blocks, int32_t capacity,
    const int32_t *kinds, double margin, uint16_t *masks, const uint8_t *seen, const float *waits,
    const int32_t *names)
{
    panel *p = calloc(1, sizeof *p);
    if (!p || !(p->all = calloc(count, sizeof *p->all))) {
        free(p);
        return NULL;
    }
    p->count = count, p->blocks = blocks, p->masks = masks;
    for (int i = 0; i < count; i++) {
        directory *d = &p->all[i];
        d->kind = kinds[i], d->bit = i, d->blocks = blocks, d->capacity = capacity;
        d->margin = d->kind == COUNT ? exp(margin) : margin;
        d->weight = 1, d->growth = exp2(1 / (FADING * blocks));
        d->seen = seen, d->waits = waits, d->names = names;
        if (!begin(d)) {
            hpstore_directories_free_3(p);
            return NULL;
        }
    }
    return p;
}

/* Requests of `count` blocks, all below the panel's number: hits[i] gets a bit for each directory
 * that has the i-th. `phases`: 0 leaves out those of kind PHASE. Returns how many blocks left the
 * directory of bit `watched` (-1: none is), which are in `left` (count). */
int64_t hpstore_directories_request_3(panel *p, const int64_t *blocks, int64_t count, int phases,
    uint16_t *hits, int watched, int32_t *left)
{
    p->watched = watched, p->left = left, p->room = count, p->gone = 0;
    memset(hits, 0, sizeof(uint16_t) * (size_t)count);
    /* one rule after the other, so that its lists stay near */
    for (int e = 0; e < p->count; e++) {
        directory *d = &p->all[e];
        if (d->kind == PHASE && !phases)
            continue;
        for (int64_t i = 0; i < count; i++)
            hits[i] |= (uint16_t)(request(p, d, (int32_t)blocks[i]) << d->bit);
    }
    return p->gone;
}
