/* The events of an answer of the shape that most servers send, read in one pass into a row each.

The same as `stream.py`, which reads every other answer, and all of them where this was not built. What this module is
not sure of, it refuses: an event is one line `data: {...}` with an object of valid JSON, in it one choice (number 0)
or none, and in that text, calls, a finish reason and counts, and nothing else that `stream.py` would look at. Between
events there may be comments. Limited API. */

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <stdint.h>
#include <string.h>

enum { MOST_DEPTH = 64, MOST_DIGITS = 1000, MOST_TOKENS = 10000000 };

typedef struct {
  int32_t blank;      /* where the blank line behind it begins */
  int32_t characters; /* of text */
  int32_t total;      /* tokens so far, as its usage says; -1: it does not */
  int32_t said;       /* 0: it has no choice, 1: one without anything in it, 2: one with text or calls of tools */
} Row;

typedef struct {
  const char *begin, *end; /* NULL: not there */
} Slice;

typedef struct {
  Slice finish_reason, metrics;
  int32_t prompt, output, cached, reasoning; /* of the last usage, -1: it does not say */
  int reasoned;                              /* a text of reasoning has come */
} Totals;

/* What is read, of bytes that a NUL follows: nothing but `refuse` ever goes past one. */
typedef struct {
  const char *at;
  int depth, usages, metrics; /* how often the event has had these */
  int role;                   /* it names one, and no end */
  Row row;
  Totals *totals;
} Reader;

/* ---- JSON: each reads one thing from `at` on; false where it is not there, or is nothing that this module takes */

static int value(Reader *reader);

static void blanks(Reader *reader) {
  while (*reader->at == ' ' || *reader->at == '\t') reader->at++;
}

static int taken(Reader *reader, char mark) {
  blanks(reader);
  if (*reader->at != mark) return 0;
  reader->at++;
  return 1;
}

static int word(Reader *reader, const char *spelled) {
  size_t length = strlen(spelled);
  if (strncmp(reader->at, spelled, length) != 0) return 0;
  reader->at += length;
  return 1;
}

static int hex(const char *at, unsigned *code) {
  *code = 0;
  for (int k = 0; k < 4; k++) {
    char digit = at[k];
    int worth = digit >= '0' && digit <= '9' ? digit - '0'
                : digit >= 'a' && digit <= 'f' ? digit - 'a' + 10
                : digit >= 'A' && digit <= 'F' ? digit - 'A' + 10
                                               : -1;
    if (worth < 0) return 0;
    *code = *code * 16 + (unsigned)worth;
  }
  return 1;
}

static int escape(Reader *reader) {
  unsigned code, second;
  char kind = reader->at[1];
  if (kind == 0 || strchr("\"\\/bfnrtu", kind) == NULL) return 0;
  reader->at += 2;
  if (kind != 'u') return 1;
  if (!hex(reader->at, &code)) return 0;
  reader->at += 4;
  if (code < 0xD800 || code > 0xDFFF) return 1;
  if (code > 0xDBFF || reader->at[0] != '\\' || reader->at[1] != 'u' || !hex(reader->at + 2, &second)) return 0;
  reader->at += 6;
  return second >= 0xDC00 && second <= 0xDFFF;
}

/* One character of several bytes (RFC 3629, section 4). */
static int multibyte(Reader *reader) {
  const unsigned char *at = (const unsigned char *)reader->at;
  int more = at[0] >= 0xC2 && at[0] <= 0xDF ? 1 : (at[0] & 0xF0) == 0xE0 ? 2 : at[0] >= 0xF0 && at[0] <= 0xF4 ? 3 : 0;
  if (more == 0) return 0;
  /* Of the second byte: no longer form than needed, no surrogate, nothing beyond U+10FFFF. */
  unsigned char least = at[0] == 0xE0 ? 0xA0 : at[0] == 0xF0 ? 0x90 : 0x80;
  unsigned char most = at[0] == 0xED ? 0x9F : at[0] == 0xF4 ? 0x8F : 0xBF;
  if (at[1] < least || at[1] > most) return 0;
  for (int k = 2; k <= more; k++)
    if ((at[k] & 0xC0) != 0x80) return 0;
  reader->at += 1 + more;
  return 1;
}

typedef struct {
  Slice inside;
  int32_t characters;
  int escaped;
} String;

static int string(Reader *reader, String *found) {
  if (*reader->at != '"') return 0;
  *found = (String){{++reader->at, NULL}, 0, 0};
  for (; *reader->at != '"'; found->characters++) {
    unsigned char next = (unsigned char)*reader->at;
    if (next == '\\') {
      found->escaped = 1;
      if (!escape(reader)) return 0;
    } else if (next >= 0x80) {
      if (!multibyte(reader)) return 0;
    } else if (next < 0x20) {
      return 0;
    } else {
      reader->at++;
    }
  }
  found->inside.end = reader->at++;
  return 1;
}

static int digits(Reader *reader) {
  const char *first = reader->at;
  while (*reader->at >= '0' && *reader->at <= '9') reader->at++;
  return reader->at != first && reader->at - first <= MOST_DIGITS;
}

static int number(Reader *reader) {
  if (*reader->at == '-') reader->at++;
  if (*reader->at == '0')
    reader->at++;
  else if (!digits(reader))
    return 0;
  if (*reader->at == '.' && (reader->at++, !digits(reader))) return 0;
  if (*reader->at != 'e' && *reader->at != 'E') return 1;
  reader->at++;
  if (*reader->at == '+' || *reader->at == '-') reader->at++;
  return digits(reader);
}

/* The members of an object: `member` reads the value of a key, whose name has no escape. Their number, or -1. */
typedef int (*Member)(Reader *reader, const Slice *key, void *into);

static int object(Reader *reader, Member member, void *into) {
  String key;
  int count = 0;
  if (!taken(reader, '{') || ++reader->depth > MOST_DEPTH) return -1;
  if (!taken(reader, '}')) {
    do {
      blanks(reader);
      if (!string(reader, &key) || key.escaped || !taken(reader, ':')) return -1;
      blanks(reader);
      if (!member(reader, &key.inside, into)) return -1;
      count++;
    } while (taken(reader, ','));
    if (!taken(reader, '}')) return -1;
  }
  reader->depth--;
  return count;
}

static int any(Reader *reader, const Slice *key, void *into) {
  (void)key, (void)into;
  return value(reader);
}

static int value(Reader *reader) {
  String ignored;
  switch (*reader->at) {
  case '{': return object(reader, any, NULL) >= 0;
  case '"': return string(reader, &ignored);
  case 't': return word(reader, "true");
  case 'f': return word(reader, "false");
  case 'n': return word(reader, "null");
  case '[':
    reader->at++;
    if (++reader->depth > MOST_DEPTH) return 0;
    if (!taken(reader, ']')) {
      do {
        blanks(reader);
        if (!value(reader)) return 0;
      } while (taken(reader, ','));
      if (!taken(reader, ']')) return 0;
    }
    reader->depth--;
    return 1;
  default: return number(reader);
  }
}

/* ---- what an answer's events hold */

static int is(const Slice *key, const char *name) {
  size_t length = (size_t)(key->end - key->begin);
  return length == strlen(name) && memcmp(key->begin, name, length) == 0;
}

/* null, or a list without anything in it */
static int nothing(Reader *reader) {
  return word(reader, "null") || (taken(reader, '[') && taken(reader, ']'));
}

/* As `nothing`, or what Python calls true: a list or an object with something in it. */
static int calls(Reader *reader, int *any) {
  Reader before = *reader;
  if (*any) return 0;
  if (nothing(reader)) return 1;
  *reader = before;
  if (*reader->at != '[' && *reader->at != '{') return 0;
  reader->at++;
  if (taken(reader, '}')) return 0;
  reader->at = before.at;
  return *any = value(reader);
}

/* A count into `into`, which was not told before (-1); null is none. */
static int count(Reader *reader, int32_t *into) {
  if (*into != -1) return 0;
  if (word(reader, "null")) return 1;
  int32_t found = 0;
  const char *first = reader->at;
  if (*first == '-' || !number(reader)) return 0;
  for (const char *at = first; at != reader->at; at++) {
    if (*at < '0' || *at > '9' || found > MOST_TOKENS) return 0;
    found = found * 10 + (*at - '0');
  }
  *into = found;
  return found <= MOST_TOKENS;
}

/* A string or null. Of a key that an object has twice the last counts, so nothing may follow a string. */
static int once(Reader *reader, String *into) {
  return into->inside.begin == NULL && (word(reader, "null") || string(reader, into));
}

typedef struct {
  String role, content, reasoning, reasoning_content, text, refusal;
  int tool_calls, function_call;
} Part;

static int part(Reader *reader, const Slice *key, Part *into, int *known) {
  *known = 1;
  if (is(key, "role")) return once(reader, &into->role);
  if (is(key, "content")) return once(reader, &into->content);
  if (is(key, "reasoning")) return once(reader, &into->reasoning);
  if (is(key, "reasoning_content")) return once(reader, &into->reasoning_content);
  if (is(key, "text")) return once(reader, &into->text);
  if (is(key, "refusal")) return once(reader, &into->refusal);
  if (is(key, "reasoning_details")) return nothing(reader);
  if (is(key, "tool_calls")) return calls(reader, &into->tool_calls);
  if (is(key, "function_call")) return calls(reader, &into->function_call);
  *known = 0;
  return 1;
}

static int32_t characters(const Part *part) {
  return part->content.characters + part->reasoning.characters + part->reasoning_content.characters +
         part->text.characters + part->refusal.characters;
}

typedef struct {
  Part own, delta;
  String finish_reason;
  int members, deltas; /* of the delta: how many members, and how many there were of it */
} Choice;

static int in_delta(Reader *reader, const Slice *key, void *into) {
  int known;
  return part(reader, key, into, &known) && (known || value(reader));
}

static int in_choice(Reader *reader, const Slice *key, void *into) {
  Choice *choice = into;
  int known, right = part(reader, key, &choice->own, &known);
  if (known) return right;
  if (is(key, "delta")) {
    if (choice->deltas++) return 0;
    if (word(reader, "null")) return 1;
    choice->members = object(reader, in_delta, &choice->delta);
    return choice->members >= 0;
  }
  if (is(key, "finish_reason"))
    return once(reader, &choice->finish_reason) && !choice->finish_reason.escaped &&
           !is(&choice->finish_reason.inside, "error") && !is(&choice->finish_reason.inside, "abort") &&
           !is(&choice->finish_reason.inside, "insufficient_system_resource");
  if (is(key, "index")) return word(reader, "0") && strchr(",} ", *reader->at) != NULL;
  if (is(key, "message") || is(key, "token_ids")) return nothing(reader);
  return value(reader);
}

static int choices(Reader *reader) {
  if (reader->row.said || !taken(reader, '[')) return 0;
  if (taken(reader, ']')) return 1;
  Choice choice = {0};
  blanks(reader);
  if (object(reader, in_choice, &choice) < 0 || !taken(reader, ']')) return 0;
  if (choice.finish_reason.inside.begin) reader->totals->finish_reason = choice.finish_reason.inside;
  const Part *part = choice.members > 0 ? &choice.delta : &choice.own;
  reader->role = choice.delta.role.characters && !choice.finish_reason.characters;
  reader->row.characters = characters(part);
  if (part->reasoning.characters || part->reasoning_content.characters) reader->totals->reasoned = 1;
  reader->row.said = reader->row.characters || part->tool_calls || part->function_call ? 2 : 1;
  return 1;
}

static int in_details(Reader *reader, const Slice *key, void *into) {
  return is(key, "cached_tokens") ? count(reader, into) : value(reader);
}

static int in_output_details(Reader *reader, const Slice *key, void *into) {
  return is(key, "reasoning_tokens") ? count(reader, into) : value(reader);
}

static int in_usage(Reader *reader, const Slice *key, void *into) {
  Totals *totals = into;
  if (is(key, "prompt_tokens")) return count(reader, &totals->prompt);
  if (is(key, "completion_tokens")) return count(reader, &totals->output);
  if (is(key, "prompt_tokens_details"))
    return totals->cached == -1 && (word(reader, "null") || object(reader, in_details, &totals->cached) >= 0);
  if (is(key, "completion_tokens_details"))
    return word(reader, "null") || object(reader, in_output_details, &totals->reasoning) >= 0;
  return in_output_details(reader, key, &totals->reasoning); /* some have them beside the others */
}

static int usage(Reader *reader) {
  if (reader->usages++) return 0;
  if (word(reader, "null")) return 1;
  Totals *totals = reader->totals;
  totals->prompt = totals->output = totals->cached = totals->reasoning = -1;
  if (object(reader, in_usage, totals) < 0) return 0;
  reader->row.total = totals->output;
  return 1;
}

static int in_event(Reader *reader, const Slice *key, void *into) {
  String said = {0};
  if (is(key, "choices")) return choices(reader);
  if (is(key, "usage")) return usage(reader);
  if (is(key, "error")) return word(reader, "null");
  if (is(key, "object")) return once(reader, &said) && !said.escaped && !is(&said.inside, "error");
  if (is(key, "metrics")) {
    if (reader->metrics++) return 0;
    if (word(reader, "null")) return 1;
    Slice metrics = {reader->at, NULL};
    if (object(reader, any, NULL) < 0) return 0;
    metrics.end = reader->at;
    reader->totals->metrics = metrics;
    return 1;
  }
  (void)into;
  return value(reader);
}

/* ---- the module */

static PyObject *text(const Slice *slice) {
  if (slice->begin == NULL) Py_RETURN_NONE;
  return PyBytes_FromStringAndSize(slice->begin, slice->end - slice->begin);
}

static int line_end(Reader *reader) { return word(reader, "\n") || word(reader, "\r\n"); }

/* A comment and its blank line. */
static int comment(Reader *reader) {
  if (*reader->at != ':') return 0;
  while (*reader->at != 0 && *reader->at != '\n' && *reader->at != '\r') reader->at++;
  return line_end(reader) && line_end(reader);
}

static int event(Reader *reader, const char *begin) {
  reader->row = (Row){0, 0, -1, 0};
  reader->usages = reader->metrics = reader->role = 0;
  if (!word(reader, "data: ") || object(reader, in_event, NULL) < 0 || !line_end(reader)) return 0;
  reader->row.blank = (int32_t)(reader->at - begin);
  return line_end(reader);
}

static int end_mark(Reader *reader) { return word(reader, "data: [DONE]") && line_end(reader) && line_end(reader); }

/* events(body) is None, or (rows, finish reason, metrics, prompt tokens, output tokens, cached tokens, done): rows as
   `Row` has them, the two texts as they stand in the JSON or None, counts of the last usage, -1 for what it lacks. */
static PyObject *events(PyObject *module, PyObject *body) {
  char *begin;
  Py_ssize_t length, count = 0, room = 0;
  (void)module;
  if (PyBytes_AsStringAndSize(body, &begin, &length) < 0) return NULL;
  Totals totals = {{NULL, NULL}, {NULL, NULL}, -1, -1, -1, -1, 0};
  Reader reader = {begin, 0, 0, 0, 0, {0, 0, -1, 0}, &totals};
  Row *rows = NULL;
  int done = 0, said = 0, regular = length < INT32_MAX;
  while (regular && !done && reader.at < begin + length) {
    const char *at = reader.at;
    if ((regular = comment(&reader))) continue;
    reader.at = at;
    if ((done = regular = end_mark(&reader))) continue;
    reader.at = at;
    if (count == room) {
      room = room ? 2 * room : 128;
      Row *more = PyMem_Realloc(rows, (size_t)room * sizeof *rows);
      if (more == NULL) {
        PyMem_Free(rows);
        return PyErr_NoMemory();
      }
      rows = more;
    }
    regular = event(&reader, begin);
    if (reader.role && !said && reader.row.said == 1) reader.row.total = -1; /* before the first token */
    said |= reader.row.said;
    rows[count++] = reader.row;
  }
  PyObject *found = Py_None;
  if (totals.reasoning > 0 && !totals.reasoned) regular = 0; /* what was never sent, `stream.py` leaves out */
  if (regular && said && reader.at == begin + length)
    found = Py_BuildValue("(y#NNiiii)", (const char *)rows, count * (Py_ssize_t)sizeof *rows,
                          text(&totals.finish_reason), text(&totals.metrics),
                          totals.prompt, totals.output, totals.cached, done);
  else
    Py_INCREF(found);
  PyMem_Free(rows);
  return found;
}

static PyMethodDef methods[] = {
    {"events", events, METH_O, "The events of an answer, if it is of the shape."}, {NULL, NULL, 0, NULL}};

static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, "_events", NULL, -1, methods, NULL, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit__events(void) { return PyModule_Create(&module); }
