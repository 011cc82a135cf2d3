#include "intern.h"

#include <stdlib.h>
#include <string.h>

static uint64_t hash_of(const char *text, int64_t length) {
    uint64_t hash = 0x9e3779b97f4a7c15ull ^ (uint64_t)length, word;
    while (length >= 8) {
        memcpy(&word, text, 8);
        hash = (hash ^ word) * 0xff51afd7ed558ccdull;
        hash ^= hash >> 32;
        text += 8;
        length -= 8;
    }
    word = 0;
    memcpy(&word, text, (size_t)length);
    hash = (hash ^ word) * 0xc4ceb9fe1a85ec53ull;
    return hash ^ (hash >> 29);
}

static int grow_slots(weft_intern *table) {
    int64_t slots = table->slots ? table->slots * 2 : 256;
    int32_t *slot = calloc((size_t)slots, sizeof *slot);
    if (!slot)
        return 0;
    for (int64_t i = 0; i < table->count; i++) {
        const char *text = table->text + table->offset[i];
        uint64_t at = hash_of(text, table->offset[i + 1] - table->offset[i]) & (uint64_t)(slots - 1);
        while (slot[at])
            at = (at + 1) & (uint64_t)(slots - 1);
        slot[at] = (int32_t)i + 1;
    }
    free(table->slot);
    table->slot = slot;
    table->slots = slots;
    return 1;
}

static int grow_entries(weft_intern *table, int64_t length) {
    if (table->count + 1 >= table->room) {
        int64_t room = table->room ? table->room * 2 : 64;
        int64_t *offset = realloc(table->offset, (size_t)(room + 1) * sizeof *offset);
        if (!offset)
            return 0;
        table->offset = offset;
        int32_t *tag = realloc(table->tag, (size_t)(room + 1) * sizeof *tag);
        if (!tag)
            return 0;
        table->tag = tag;
        if (!table->room)
            table->offset[0] = 0;
        table->room = room;
    }
    if (table->text_bytes + length > table->text_room) {
        int64_t room = (table->text_room ? table->text_room * 2 : 4096) + length;
        char *text = realloc(table->text, (size_t)room);
        if (!text)
            return 0;
        table->text = text;
        table->text_room = room;
    }
    return 1;
}

int64_t weft_intern_of(weft_intern *table, const char *text, int64_t length, int *fresh) {
    if (table->count * 2 >= table->slots && !grow_slots(table))
        return -1;
    uint64_t at = hash_of(text, length) & (uint64_t)(table->slots - 1);
    *fresh = 0;
    while (table->slot[at]) {
        int64_t i = table->slot[at] - 1;
        if (table->offset[i + 1] - table->offset[i] == length &&
            !memcmp(table->text + table->offset[i], text, (size_t)length))
            return i;
        at = (at + 1) & (uint64_t)(table->slots - 1);
    }
    if (!grow_entries(table, length))
        return -1;
    memcpy(table->text + table->text_bytes, text, (size_t)length);
    table->text_bytes += length;
    table->offset[++table->count] = table->text_bytes;
    table->tag[table->count - 1] = 0;
    table->slot[at] = (int32_t)table->count;
    *fresh = 1;
    return table->count - 1;
}

void weft_intern_free(weft_intern *table) {
    free(table->text);
    free(table->offset);
    free(table->tag);
    free(table->slot);
    memset(table, 0, sizeof *table);
}
