/* Rules that keep the most counted blocks, the first ones, or those that epochs need soonest. */
#include "directories.h"

#include <math.h>

enum { DRAWN = 8 };
#define MOST_WEIGHT 1e200

static void put(heap *h, int32_t at, int32_t block)
{
    h->order[at] = block, h->place[block] = at;
}

static void sift_up(heap *h, int32_t at)
{
    int32_t block = h->order[at];
    for (; at; at = (at - 1) / 2) {
        int32_t above = h->order[(at - 1) / 2];
        if (h->key[above] <= h->key[block])
            break;
        put(h, at, above);
    }
    put(h, at, block);
}

static void sift_down(heap *h, int32_t at)
{
    int32_t block = h->order[at];
    for (;;) {
        int32_t below = 2 * at + 1;
        if (below >= h->length)
            break;
        if (below + 1 < h->length && h->key[h->order[below + 1]] < h->key[h->order[below]])
            below++;
        if (h->key[h->order[below]] >= h->key[block])
            break;
        put(h, at, h->order[below]);
        at = below;
    }
    put(h, at, block);
}

static void push(heap *h, int32_t block)
{
    put(h, h->length, block);
    sift_up(h, h->length++);
}

static int32_t pop(heap *h)
{
    int32_t block = h->order[0];
    h->place[block] = -1;
    if (--h->length) {
        put(h, 0, h->order[h->length]);
        sift_down(h, 0);
    }
    return block;
}

int lfu(panel *p, directory *d, int32_t b)
{
    heap *h = &d->counts;
    double now = ++d->made * 1e-12; /* of equals the least recent is the least */
    if (h->place[b] >= 0) {
        h->key[b] = floor(h->key[b]) + 1 + now;
        sift_down(h, h->place[b]);
        return 1;
    }
    if (h->length >= d->capacity)
        leave(p, d, pop(h));
    h->key[b] = 1 + now, push(h, b), enter(p, d, b);
    return 0;
}

/* A request weighs more the later it comes, so that nothing ages; before the weights leave the range
 * of numbers all are made smaller. */
static void weigh(directory *d, int32_t b)
{
    double *key = d->counts.key;
    d->weight *= d->growth;
    if (d->weight > MOST_WEIGHT) {
        for (int32_t i = 0; i < d->blocks; i++)
            key[i] /= MOST_WEIGHT;
        d->weight /= MOST_WEIGHT;
    }
    key[b] += d->weight;
}

int count(panel *p, directory *d, int32_t b)
{
    heap *h = &d->counts;
    double before = h->key[b]++;
    if (h->place[b] >= 0) {
        sift_down(h, h->place[b]);
        return 1;
    }
    if (h->length >= d->capacity) {
        if (before <= h->key[h->order[0]] * d->margin)
            return 0;
        leave(p, d, pop(h));
    }
    push(h, b), enter(p, d, b);
    return 0;
}

int fresh_count(panel *p, directory *d, int32_t b)
{
    heap *h = &d->counts;
    weigh(d, b);
    if (h->place[b] >= 0) {
        sift_down(h, h->place[b]);
        return 1;
    }
    if (h->length >= d->capacity) {
        if (h->key[b] < h->key[h->order[0]])
            return 0;
        leave(p, d, pop(h));
    }
    push(h, b), enter(p, d, b);
    return 0;
}

int fixed(panel *p, directory *d, int32_t b)
{
    if (d->state[b])
        return 1;
    if (d->made < d->capacity)
        d->made++, d->state[b] = 1, enter(p, d, b);
    return 0;
}

static float wait_of(const directory *d, int32_t b)
{
    return d->waits[d->seen[d->names ? d->names[b] : b]];
}

int phase(panel *p, directory *d, int32_t b)
{
    heap *h = &d->counts; /* only its list */
    if (h->place[b] >= 0)
        return 1;
    if (h->length < d->capacity) {
        put(h, h->length++, b), enter(p, d, b);
        return 0;
    }
    int32_t latest = 0;
    float most = -HUGE_VALF;
    for (int i = 0; i < DRAWN; i++) {
        d->draws = d->draws * 1664525u + 1013904223u;
        int32_t at = (int32_t)((uint64_t)d->draws * (uint32_t)h->length >> 32);
        float wait = wait_of(d, h->order[at]);
        if (wait > most)
            most = wait, latest = at;
    }
    if (wait_of(d, b) + (float)d->margin < most) {
        int32_t gone = h->order[latest];
        h->place[gone] = -1, leave(p, d, gone);
        put(h, latest, b), enter(p, d, b);
    }
    return 0;
}
