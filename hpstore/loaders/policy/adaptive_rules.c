/* Rules that divide their room by what came back: ARC and LIRS. */
#include "directories.h"

#include <math.h>

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

int arc(panel *p, directory *d, int32_t b)
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

int lirs(panel *p, directory *d, int32_t b)
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
