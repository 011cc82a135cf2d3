/* Finds a symbol of the libc in its own ELF tables. Needed for libcs without dlvsym (musl), where every lookup of dlsym
 * through the loader returns the shim's. */
#define _GNU_SOURCE
#include "weft.h"

#include <dlfcn.h>
#include <link.h>
#include <string.h>

typedef struct {
    const char *name;
    void *found, *own_base;
} search;

static uint32_t symbols_by_gnu_hash(const uint32_t *table) {
    uint32_t count = table[0], offset = table[1], bloom = table[2], last = 0;
    const uint32_t *buckets = table + 4 + bloom * (sizeof(ElfW(Addr)) / 4), *chains = buckets + count;
    for (uint32_t i = 0; i < count; i++)
        last = buckets[i] > last ? buckets[i] : last;
    while (last >= offset && !(chains[last - offset] & 1))
        last++;
    return last < offset ? 0 : last + 1;
}

/* Some libcs store absolute addresses in the table, others offsets. */
static const void *at(ElfW(Addr) base, ElfW(Addr) address) {
    return (const void *)(address < base ? base + address : address);
}

static int look_into(struct dl_phdr_info *info, size_t size, void *data) {
    search *s = data;
    const ElfW(Dyn) *entry = NULL;
    (void)size;
    for (int i = 0; i < info->dlpi_phnum; i++)
        if (info->dlpi_phdr[i].p_type == PT_DYNAMIC)
            entry = (const ElfW(Dyn) *)(info->dlpi_addr + info->dlpi_phdr[i].p_vaddr);
    if (!entry || (void *)info->dlpi_addr == s->own_base)
        return 0;
    const ElfW(Sym) *symbols = NULL;
    const char *names = NULL;
    uint32_t count = 0;
    for (; entry->d_tag != DT_NULL; entry++) {
        const void *there = at(info->dlpi_addr, entry->d_un.d_ptr);
        if (entry->d_tag == DT_SYMTAB)
            symbols = there;
        else if (entry->d_tag == DT_STRTAB)
            names = there;
        else if (entry->d_tag == DT_HASH)
            count = ((const uint32_t *)there)[1];
        else if (entry->d_tag == DT_GNU_HASH && !count)
            count = symbols_by_gnu_hash(there);
    }
    for (uint32_t i = 0; symbols && names && i < count && !s->found; i++)
        if (symbols[i].st_shndx != SHN_UNDEF && (symbols[i].st_info & 0xf) == STT_FUNC &&
            strcmp(names + symbols[i].st_name, s->name) == 0)
            s->found = (void *)(info->dlpi_addr + symbols[i].st_value);
    return s->found != NULL;
}

void *weft_elf_symbol(const char *name) {
    Dl_info own;
    search s = {.name = name, .own_base = dladdr((void *)weft_elf_symbol, &own) ? own.dli_fbase : NULL};
    dl_iterate_phdr(look_into, &s);
    return s.found;
}
