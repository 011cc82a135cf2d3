#include "weft.h"
void *weft_hip_own(const char *name) { (void)name; return NULL; }
bool weft_hip_driver(const char *name) { (void)name; return false; }
void weft_hip_found(const char *name, void *real) { (void)name; (void)real; }
