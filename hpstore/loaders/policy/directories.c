/* Directories of caches that hold no data: which blocks each of several policies would keep.
 *
 * The same rules, step by step, as the classes of plain_queues.py and plain_adaptive.py in Python and
 * of tests/unit/counted_policies.py: a property test compares them. Blocks are numbered from 0, all of one size. Nothing of Python is in here: it is
 * called by its address, without the interpreter's lock, by one thread at a time.
 */
#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

/* of policies: the bit in masks; the order is that of KINDS in directories.py */
enum { LRU, LFU, ARC, LIRS, S3_FIFO, SIEVE, TINY_LFU, TWO_QUEUE, COUNT, STATIC, PHASE };
enum { DRAWN = 8 };

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
    int kind, bit, fresh, evicted;
    int32_t blocks, capacity, hand, limit[4], close;
    lists queue, second;
    heap counts;
    uint8_t *state, *hits;
    double target, pace, margin;
    int64_t made;
    uint32_t draws;
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

static void add(lists *l, int h, int32_t block)
{
    int32_t end = l->blocks + h, newest = l->older[end];
    l->older[end] = block, l->newer[newest] = block;
    l->older[block] = newest, l->newer[block] = end;
    l->length[h]++;
}

static void cut(lists *l, int h, int32_t block)
{
    int32_t older = l->older[block], newer = l->newer[block];
    l->newer[older] = newer, l->older[newer] = older;
    l->length[h]--;
}

static int32_t oldest(const lists *l, int h) { return l->newer[l->blocks + h]; }

static int32_t take_oldest(lists *l, int h)
{
    int32_t block = oldest(l, h);
    cut(l, h, block);
    return block;
}

static void renew(lists *l, int h, int32_t block)
{
    cut(l, h, block);
    add(l, h, block);
}

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

static void enter(panel *p, const directory *d, int32_t b) { p->masks[b] |= 1u << d->bit; }

static void leave(panel *p, const directory *d, int32_t b)
{
    p->masks[b] &= ~(1u << d->bit);
    if (d->bit == p->watched && p->gone < p->room)
        p->left[p->gone++] = b;
}

static int lru(panel *p, directory *d, int32_t b)
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

static int lfu(panel *p, directory *d, int32_t b)
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

static int sieve(panel *p, directory *d, int32_t b)
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

static int two_queue(panel *p, directory *d, int32_t b)
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

enum { ONCE, OFTEN, ONCE_GONE, OFTEN_GONE };

static void arc_replace(panel *p, directory *d, int often)
{
    lists *l = &d->queue;
    int32_t once = l->length[ONCE];
    int above = once > d->target || (often && once == (int32_t)d->target);
    int from = once && (above || !l->length[OFTEN]) ? ONCE : OFTEN;
    int32_t gone = take_oldest(l, from);
    leave(p, d, gone);
    add(l, from + ONCE_GONE, gone), d->state[gone] = from + ONCE_GONE + 1;
}

static int arc(panel *p, directory *d, int32_t b)
{
    lists *l = &d->queue;
    int where = d->state[b] - 1;
    int32_t room = d->capacity;
    if (where == ONCE || where == OFTEN) {
        cut(l, where, b), add(l, OFTEN, b), d->state[b] = OFTEN + 1;
        return 1;
    }
    if (where >= 0) {
        double first = l->length[ONCE_GONE], second = l->length[OFTEN_GONE];
        if (where == ONCE_GONE)
            d->target = fmin(room, d->target + fmax(1, second / first));
        else
            d->target = fmax(0, d->target - fmax(1, first / second));
        arc_replace(p, d, where == OFTEN_GONE);
        cut(l, where, b), add(l, OFTEN, b), d->state[b] = OFTEN + 1, enter(p, d, b);
        return 0;
    }
    int32_t recent = l->length[ONCE] + l->length[ONCE_GONE];
    int32_t known = recent + l->length[OFTEN] + l->length[OFTEN_GONE];
    if (recent >= room && l->length[ONCE] >= room) {
        int32_t gone = take_oldest(l, ONCE);
        d->state[gone] = 0, leave(p, d, gone);
    } else if (recent >= room) {
        d->state[take_oldest(l, ONCE_GONE)] = 0;
        arc_replace(p, d, 0);
    } else if (known >= room) {
        if (known >= 2 * room)
            d->state[take_oldest(l, OFTEN_GONE)] = 0;
        arc_replace(p, d, 0);
    }
    add(l, ONCE, b), d->state[b] = ONCE + 1, enter(p, d, b);
    return 0;
}

/* LIRS: the stack is list 0 of queue; of second 0 are the residents that are not close, 1 the gone */
enum { IN_STACK = 1, CLOSE = 2, QUEUED = 4 };

static void lirs_prune(directory *d)
{
    while (d->queue.length[0]) {
        int32_t last = oldest(&d->queue, 0);
        if (d->state[last] & CLOSE)
            return;
        cut(&d->queue, 0, last);
        if (!(d->state[last] & QUEUED))
            cut(&d->second, 1, last);
        d->state[last] &= ~IN_STACK;
    }
}

static void lirs_demote(directory *d)
{
    int32_t block = take_oldest(&d->queue, 0);
    d->state[block] = QUEUED, d->close--;
    add(&d->second, 0, block);
    lirs_prune(d);
}

static void lirs_draw_close(directory *d, int32_t b)
{
    d->state[b] = IN_STACK | CLOSE;
    if (++d->close > d->limit[0])
        lirs_demote(d);
}

static int lirs(panel *p, directory *d, int32_t b)
{
    lists *stack = &d->queue, *rest = &d->second;
    int was = d->state[b];
    if (was & CLOSE) {
        int last = oldest(stack, 0) == b;
        renew(stack, 0, b);
        if (last)
            lirs_prune(d);
        return 1;
    }
    if (was & IN_STACK)
        cut(stack, 0, b);
    if (was & QUEUED) {
        add(stack, 0, b);
        cut(rest, 0, b);
        if (was & IN_STACK)
            lirs_draw_close(d, b);
        else
            add(rest, 0, b), d->state[b] = IN_STACK | QUEUED;
        return 1;
    }
    if (was & IN_STACK)
        cut(rest, 1, b), d->state[b] = 0;
    if (d->close + rest->length[0] >= d->capacity) {
        if (!rest->length[0])
            lirs_demote(d);
        int32_t gone = take_oldest(rest, 0);
        d->state[gone] &= ~QUEUED, leave(p, d, gone);
        if (d->state[gone] & IN_STACK)
            add(rest, 1, gone);
    }
    add(stack, 0, b), enter(p, d, b);
    if ((was & IN_STACK) || d->close < d->limit[0])
        lirs_draw_close(d, b);
    else
        add(rest, 0, b), d->state[b] = IN_STACK | QUEUED;
    while (stack->length[0] > 2 * (int64_t)d->capacity && rest->length[1]) {
        int32_t forgotten = take_oldest(rest, 1);
        cut(stack, 0, forgotten), d->state[forgotten] = 0;
    }
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

static int s3_fifo(panel *p, directory *d, int32_t b)
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

static int tiny_lfu(panel *p, directory *d, int32_t b)
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

static int count(panel *p, directory *d, int32_t b)
{
    heap *h = &d->counts;
    double now = ++d->made * d->pace, before = h->key[b];
    double after = before == -HUGE_VAL ? now : now + log1p(exp(before - now));
    h->key[b] = after;
    if (h->place[b] >= 0) {
        sift_down(h, h->place[b]);
        return 1;
    }
    if (h->length >= d->capacity) {
        double least = h->key[h->order[0]];
        if (d->fresh ? after < least : before <= least + d->margin)
            return 0;
        leave(p, d, pop(h));
    }
    push(h, b), enter(p, d, b);
    return 0;
}

static int fixed(panel *p, directory *d, int32_t b)
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

static int phase(panel *p, directory *d, int32_t b)
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
    case STATIC: return fixed(p, d, b);
    default: return phase(p, d, b);
    }
}

static int32_t at_least_one(int32_t value) { return value < 1 ? 1 : value; }

static int begin(directory *d)
{
    int32_t n = d->blocks, room = d->capacity;
    int counted = d->kind == LFU || d->kind == COUNT || d->kind == PHASE;
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
    h->key = malloc(d->kind == PHASE ? 1 : sizeof(double) * (size_t)n);
    if (!h->order || !h->place || !h->key)
        return 0;
    memset(h->place, 255, sizeof(int32_t) * (size_t)n);
    for (int32_t i = 0; d->kind != PHASE && i < n; i++)
        h->key[i] = -HUGE_VAL;
    return 1;
}

void hpstore_directories_free_1(panel *p)
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

/* `kinds`, `paces` (of COUNT: fading a request), `margins` and `fresh`: of each of `count` <= 16
 * directories. `masks` (blocks), `seen`, `waits` (256) and `names` (blocks, or NULL) stay the
 * caller's and must outlive it. NULL without memory. */
panel *hpstore_directories_begin_1(int count, int32_t blocks, int32_t capacity,
    const int32_t *kinds, const double *paces, const double *margins, const int32_t *fresh,
    uint16_t *masks, const uint8_t *seen, const float *waits, const int32_t *names)
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
        d->pace = paces[i], d->margin = margins[i], d->fresh = fresh[i];
        d->seen = seen, d->waits = waits, d->names = names;
        if (!begin(d)) {
            hpstore_directories_free_1(p);
            return NULL;
        }
    }
    return p;
}

/* Requests of `count` blocks, all below the panel's number: hits[i] gets a bit for each directory
 * that has the i-th. `phases`: 0 leaves out those of kind PHASE. Returns how many blocks left the
 * directory of bit `watched` (-1: none is), which are in `left` (count). */
int64_t hpstore_directories_request_1(panel *p, const int64_t *blocks, int64_t count, int phases,
    uint16_t *hits, int watched, int32_t *left)
{
    p->watched = watched, p->left = left, p->room = count, p->gone = 0;
    for (int64_t i = 0; i < count; i++) {
        uint16_t found = 0;
        for (int e = 0; e < p->count; e++)
            if (phases || p->all[e].kind != PHASE)
                found |= (uint16_t)(request(p, &p->all[e], (int32_t)blocks[i]) << e);
        hits[i] = found;
    }
    return p->gone;
}
