#include "error.h"

#include <stdarg.h>
#include <stdio.h>

#include "colibri.h"

static _Thread_local char message[512];

int fail(const char *format, ...) {
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(message, sizeof message, format, arguments);
    va_end(arguments);
    return -1;
}

const char *colibri_error(void) { return message; }
