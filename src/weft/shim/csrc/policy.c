/* The policy in force: the job's or this process's own. Their files are read again whenever one was written. */
#include "weft.h"

#include <pthread.h>
#include <stdlib.h>
#include <string.h>

enum { POLICIES = 128, RETRY_EVERY = 256, TRIES = 8 };

const weft_rules weft_no_policy = {.neutral = true};

static weft_control *job;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
/* The latest policies. They are never freed, since a thread may still read one that was replaced long ago. */
static weft_rules *known[POLICIES];
static uint32_t published;
static _Atomic uint32_t torn; /* launches since an incomplete policy was found; 0: none was found */

void weft_policy_of(weft_control *control) {
    job = control;
    weft_hot.job_sequence = &job->sequence;
    weft_hot.seen_job = weft_hot.seen_self = UINT64_MAX; /* so that the first launch reads the policy */
}

void weft_forget_policy(void) {
    pthread_mutex_init(&lock, NULL);
    job = NULL;
    weft_hot.job_sequence = NULL;
    atomic_store(&weft_hot.active, &weft_no_policy);
    atomic_store(&weft_hot.neutral, false);
    atomic_store(&torn, 0);
}

static uint64_t checksum(const void *data, size_t size) { /* Adler-32, as in Python's zlib */
    const unsigned char *bytes = data;
    uint32_t a = 1, b = 0;
    for (size_t i = 0; i < size; i++) {
        a = (a + bytes[i]) % 65521;
        b = (b + a) % 65521;
    }
    return (uint64_t)b << 16 | a;
}

static uint64_t sequence_of(const weft_control *c) {
    return atomic_load_explicit(&((weft_control *)c)->sequence, memory_order_acquire);
}

/* Copies a policy and its checksum; the sequence number must be the same before and after. False if the policy was
 * being written at every try. `sequence`: the number before the latest try. */
static bool copy(const weft_control *from, weft_policy *into, uint64_t *expected, uint64_t *sequence) {
    for (int tries = 0; tries < TRIES && !((*sequence = sequence_of(from)) & 1); tries++) {
        if (*sequence == 0) { /* never written: a hole in the file, which must not even be read on a full disk */
            memset(into, 0, sizeof *into);
            return true;
        }
        *expected = from->checksum;
        memcpy(into, &from->policy, sizeof *into);
        atomic_thread_fence(memory_order_acquire);
        if (sequence_of(from) == *sequence)
            return true;
    }
    return false;
}

/* Copies a policy that may be changing; false if no complete copy was possible this time. */
static bool take(const weft_control *from, weft_policy *into, uint64_t *sequence) {
    uint64_t expected = 0;
    if (!copy(from, into, &expected, sequence))
        return false;
    if (*sequence == 0)
        return true;
    if (checksum(into, sizeof *into) != expected || into->rule_count > WEFT_RULES ||
        into->comm_count > WEFT_COMM_PATTERNS || into->comm_rule_count > WEFT_COMM_RULES)
        return false;
    for (uint32_t i = 0; i < WEFT_RULES; i++)
        into->rules[i].pattern[WEFT_PATTERN - 1] = '\0';
    for (uint32_t i = 0; i < WEFT_COMM_PATTERNS; i++)
        into->comm[i][WEFT_PATTERN - 1] = '\0';
    return true;
}

static void fill(weft_rules *rules, const weft_policy *policy) {
    rules->data = *policy;
    rules->shapes = policy->residency > 0;
    for (uint32_t i = 0; i < policy->rule_count; i++)
        rules->shapes |= policy->rules[i].residency > 0;
    rules->neutral = !rules->shapes && !(policy->flags & (WEFT_PRIORITY_HIGH | WEFT_TRACK | WEFT_ENGINE_DMA)) &&
                     policy->head_start_ns == 0 && policy->sm_reserve == 0;
}

/* The published form of a policy. Equal policies share one, so switching back and forth costs nothing. If the table is
 * full, the oldest policy is replaced; it went out of force POLICIES - 1 changes ago. */
static const weft_rules *publish(const weft_policy *policy) {
    for (uint32_t i = 0; i < POLICIES && known[i]; i++)
        if (memcmp(&known[i]->data, policy, sizeof *policy) == 0)
            return known[i];
    uint32_t place = published % POLICIES;
    if (known[place] && known[place] == atomic_load(&weft_hot.active))
        place = ++published % POLICIES;
    if (!known[place])
        known[place] = calloc(1, sizeof *known[place]);
    weft_rules *rules = known[place];
    if (!rules)
        return atomic_load(&weft_hot.active); /* keep the policy in force */
    atomic_store(&rules->id, 0);
    fill(rules, policy);
    atomic_store(&rules->id, ++published & 0xffffff ? published & 0xffffff : (published = 1));
    return rules;
}

static void adopt(weft_policy *own, weft_policy *of_job) {
    bool outranks = own->flags & WEFT_POLICY_SET;
    if (outranks && own->comm_count == 0) { /* the job defines which kernels communicate */
        own->comm_count = of_job->comm_count;
        memcpy(own->comm, of_job->comm, sizeof own->comm);
    }
    of_job->flags |= own->flags & WEFT_TRACK;
    const weft_rules *rules = publish(outranks ? own : of_job);
    const weft_rules *before = atomic_load(&weft_hot.active);
    if (rules == before)
        return;
    atomic_store_explicit(&weft_hot.active, rules, memory_order_release);
    atomic_store_explicit(&weft_hot.neutral, rules->neutral, memory_order_release);
    if (before == &weft_no_policy)
        weft_forget_handles(); /* only now is it known which kernels communicate */
    else
        weft_count(WEFT_COUNT_POLICY_CHANGES);
}

/* If a writer was interrupted, the sequence number may stay odd forever; the block is read again when the number
 * changes. If the number is even but the checksum is wrong, the write is about to become visible, so the block is read
 * again every RETRY_EVERY launches. */
const weft_rules *weft_refresh(void) {
    static weft_policy mine, theirs; /* large; guarded by the lock */
    uint32_t waiting = atomic_load_explicit(&torn, memory_order_relaxed);
    if (waiting && atomic_fetch_add_explicit(&torn, 1, memory_order_relaxed) % RETRY_EVERY)
        return atomic_load_explicit(&weft_hot.active, memory_order_acquire);
    pthread_mutex_lock(&lock);
    uint64_t job_sequence, self_sequence;
    bool job_whole = take(job, &theirs, &job_sequence),
         self_whole = take(&weft_hot.self->control, &mine, &self_sequence);
    bool being_written = (!job_whole && job_sequence & 1) || (!self_whole && self_sequence & 1);
    if (job_whole && self_whole)
        adopt(&mine, &theirs);
    bool settled = being_written || (job_whole && self_whole);
    if (settled) {
        weft_hot.seen_job = job_sequence;
        weft_hot.seen_self = self_sequence;
    }
    atomic_store(&torn, settled ? 0 : 1);
    pthread_mutex_unlock(&lock);
    return atomic_load_explicit(&weft_hot.active, memory_order_acquire);
}
