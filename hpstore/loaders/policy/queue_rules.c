/* Rules of one to three lists of blocks: LRU, SIEVE, 2Q, S3-FIFO, W-TinyLFU. */
#include "directories.h"

int lru(panel *p, directory *d, int32_t b)
{
    if (d->state[b]) {
        renew(&d->queue, 0, b);
        return 1;
    }
    if (d->queue.length[0] >= d->capacity) {
        int32_t gone = take_oldest(&d->queue, 0);
        d->state[gone] = 0, leave(p, d, gone);
    }
    add(&d->queue, 0, b), d->state[b] = 1, enter(p, d, b);
    return 0;
}

int sieve(panel *p, directory *d, int32_t b)
{
    lists *l = &d->queue;
    enum { IN = 1, VISITED = 2 };
    if (d->state[b]) {
        d->state[b] |= VISITED;
        return 1;
    }
    if (l->length[0] >= d->capacity) {
        int32_t at = d->hand < d->blocks ? d->hand : oldest(l, 0);
        while (d->state[at] & VISITED) {
            d->state[at] = IN;
            at = l->newer[at] < d->blocks ? l->newer[at] : oldest(l, 0);
        }
        d->hand = l->newer[at];
        cut(l, 0, at), d->state[at] = 0, leave(p, d, at);
    }
    add(l, 0, b), d->state[b] = IN, enter(p, d, b);
    return 0;
}

int two_queue(panel *p, directory *d, int32_t b)
{
    lists *l = &d->queue;
    enum { NEW = 1, MAIN, GONE };
    if (d->state[b] == NEW)
        return 1;
    if (d->state[b] == MAIN) {
        renew(l, MAIN, b);
        return 1;
    }
    int again = d->state[b] == GONE;
    if (l->length[NEW] + l->length[MAIN] >= d->capacity) {
        int from = l->length[NEW] > d->limit[0] || !l->length[MAIN] ? NEW : MAIN;
        int32_t gone = take_oldest(l, from);
        d->state[gone] = 0, leave(p, d, gone);
        if (from == NEW) {
            add(l, GONE, gone), d->state[gone] = GONE;
            if (l->length[GONE] > d->limit[1])
                d->state[take_oldest(l, GONE)] = 0;
        }
    }
    if (d->state[b] == GONE)
        cut(l, GONE, b);
    d->state[b] = again ? MAIN : NEW;
    add(l, d->state[b], b), enter(p, d, b);
    return 0;
}

enum { SMALL = 1, BIG, LEFT };

static void s3_evict(panel *p, directory *d)
{
    lists *l = &d->queue;
    if (l->length[BIG] <= d->limit[1])
        while (l->length[SMALL]) {
            int32_t b = take_oldest(l, SMALL);
            int stays = d->hits[b] >= 2;
            d->hits[b] = 0, d->state[b] = stays ? BIG : LEFT, add(l, d->state[b], b);
            if (stays)
                continue;
            leave(p, d, b);
            if (l->length[LEFT] > d->limit[2])
                d->state[take_oldest(l, LEFT)] = 0;
            return;
        }
    for (;;) {
        int32_t b = take_oldest(l, BIG);
        if (!d->hits[b]) {
            d->state[b] = 0, leave(p, d, b);
            return;
        }
        d->hits[b]--, add(l, BIG, b);
    }
}

int s3_fifo(panel *p, directory *d, int32_t b)
{
    lists *l = &d->queue;
    if (d->state[b] == SMALL || d->state[b] == BIG) {
        d->hits[b] += d->hits[b] < 3;
        return 1;
    }
    int again = d->state[b] == LEFT;
    if (again)
        cut(l, LEFT, b), d->state[b] = 0;
    while (l->length[SMALL] + l->length[BIG] >= d->capacity)
        d->evicted = 1, s3_evict(p, d);
    d->hits[b] = 0;
    d->state[b] = again || (!d->evicted && l->length[SMALL] >= d->limit[0]) ? BIG : SMALL;
    add(l, d->state[b], b), enter(p, d, b);
    return 0;
}

enum { WINDOW = 1, TRIAL, SAFE };

static void tiny_admit(panel *p, directory *d, int32_t b)
{
    lists *l = &d->queue;
    int room = l->length[TRIAL] + l->length[SAFE] < d->limit[1];
    int from = l->length[TRIAL] ? TRIAL : SAFE;
    int32_t victim = room || !d->limit[1] ? -1 : oldest(l, from);
    if (!room && (victim < 0 || d->hits[b] <= d->hits[victim])) {
        d->state[b] = 0, leave(p, d, b);
        return;
    }
    if (!room)
        cut(l, from, victim), d->state[victim] = 0, leave(p, d, victim);
    add(l, TRIAL, b), d->state[b] = TRIAL;
}

int tiny_lfu(panel *p, directory *d, int32_t b)
{
    lists *l = &d->queue;
    d->hits[b] += d->hits[b] < 15;
    if (++d->made >= 10 * (int64_t)d->capacity) {
        for (int32_t i = 0; i < d->blocks; i++)
            d->hits[i] >>= 1;
        d->made /= 2;
    }
    int where = d->state[b];
    if (where == WINDOW || where == SAFE) {
        renew(l, where, b);
        return 1;
    }
    if (where == TRIAL) {
        cut(l, TRIAL, b), add(l, SAFE, b), d->state[b] = SAFE;
        if (l->length[SAFE] > d->limit[2]) {
            int32_t back = take_oldest(l, SAFE);
            add(l, TRIAL, back), d->state[back] = TRIAL;
        }
        return 1;
    }
    add(l, WINDOW, b), d->state[b] = WINDOW, enter(p, d, b);
    if (l->length[WINDOW] > d->limit[0])
        tiny_admit(p, d, take_oldest(l, WINDOW));
    return 0;
}
