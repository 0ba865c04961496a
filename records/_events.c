/* Answers of the shape that most servers send, each read in one pass, many in a call.

The same as `stream.py`, which reads every other answer, and all of them where this was not built. What this module is
not sure of, it refuses: an event is one line `data: {...}` with an object of valid JSON, in it one choice (number 0)
or none, and in that text, calls, a finish reason and counts, and nothing else that `stream.py` would look at. Between
events there may be comments. Limited API. */

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <stdint.h>
#include <stdlib.h>
#include <string.h>

enum { MOST_DEPTH = 64, MOST_DIGITS = 1000, MOST_TOKENS = 10000000, MOST_SILENT = 1 << 17, SPARE = 16 };

typedef struct {
  int64_t arrival_ns; /* of that line's first byte */
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

/* What is read, of bytes that SPARE zeros follow: nothing goes past the first of them, nor looks past the last. */
typedef struct {
  const char *at, *end;
  Slice lead;                 /* the event before up to its choices, if nothing counts that stood there */
  const char *choices;        /* of this one, likewise */
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

/* Of at most SPARE characters. */
static inline int word(Reader *reader, const char *spelled) {
  size_t length = strlen(spelled);
  if (memcmp(reader->at, spelled, length) != 0) return 0;
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

/* How many of the next eight bytes are characters of their own: none ends the string, escapes, controls, or is of a longer
   one. For any byte b, `(b - n) & ~b & 0x80` is set in the lowest one below n ("Determine if a word has a byte less than
   n", Bit Twiddling Hacks). */
static int characters_ahead(const char *at) {
  const uint64_t ones = UINT64_C(0x0101010101010101);
  uint64_t word, quote, slash, marks;
  memcpy(&word, at, sizeof word);
  quote = word ^ ones * '"';
  slash = word ^ ones * '\\';
  marks = ((word - ones * 0x20) & ~word) | ((quote - ones) & ~quote) | ((slash - ones) & ~slash) | word;
  marks &= ones * 0x80;
  return marks ? __builtin_ctzll(marks) / 8 : 8;
}

static int string(Reader *reader, String *found) {
  if (*reader->at != '"') return 0;
  *found = (String){{++reader->at, NULL}, 0, 0};
  for (;; found->characters++) {
    int ahead;
    do {
      ahead = characters_ahead(reader->at);
      reader->at += ahead;
      found->characters += ahead;
    } while (ahead == 8);
    unsigned char next = (unsigned char)*reader->at;
    if (next == '"') break;
    if (next == '\\') {
      found->escaped = 1;
      if (!escape(reader)) return 0;
    } else if (next < 0x20 || !multibyte(reader)) {
      return 0;
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

/* The members of an object, from the first one on: `member` reads the value of a key, whose name has no escape. */
typedef int (*Member)(Reader *reader, const Slice *key, void *into);

static int members(Reader *reader, Member member, void *into) {
  String key;
  int count = 0;
  do {
    blanks(reader);
    if (!string(reader, &key) || key.escaped || !taken(reader, ':')) return -1;
    blanks(reader);
    if (!member(reader, &key.inside, into)) return -1;
    count++;
  } while (taken(reader, ','));
  reader->depth--;
  return taken(reader, '}') ? count : -1;
}

/* Their number, or -1. */
static int object(Reader *reader, Member member, void *into) {
  if (!taken(reader, '{') || ++reader->depth > MOST_DEPTH) return -1;
  if (!taken(reader, '}')) return members(reader, member, into);
  reader->depth--;
  return 0;
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
  if (is(key, "choices")) {
    if (!reader->usages && !reader->metrics) reader->choices = key->begin - 1;
    return choices(reader);
  }
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

/* ---- an answer */

typedef struct {
  Row *rows; /* of its events */
  size_t count, room;
  Totals totals;
  int done, no_memory;
} Answer;

static int line_end(Reader *reader) { return word(reader, "\n") || word(reader, "\r\n"); }

/* A comment and its blank line. */
static int comment(Reader *reader) {
  if (*reader->at != ':') return 0;
  while (*reader->at != 0 && *reader->at != '\n' && *reader->at != '\r') reader->at++;
  return line_end(reader) && line_end(reader);
}

/* Most begin as the one before did: then what was found good there is not read again. */
static int event(Reader *reader, const char *body) {
  const char *begin = reader->at;
  size_t lead = (size_t)(reader->lead.end - reader->lead.begin);
  reader->row = (Row){0, 0, 0, -1, 0};
  reader->usages = reader->metrics = reader->role = 0;
  reader->choices = NULL;
  if (lead && lead <= (size_t)(reader->end - begin) && memcmp(begin, reader->lead.begin, lead) == 0) {
    reader->at += lead;
    reader->depth = 1;
    if (members(reader, in_event, NULL) < 0) return 0;
  } else if (!word(reader, "data: ") || object(reader, in_event, NULL) < 0) {
    return 0;
  }
  reader->lead = reader->choices ? (Slice){begin, reader->choices} : (Slice){NULL, NULL};
  if (!line_end(reader)) return 0;
  reader->row.blank = (int32_t)(reader->at - body);
  return line_end(reader);
}

static int end_mark(Reader *reader) { return word(reader, "data: [DONE]") && line_end(reader) && line_end(reader); }

static int add(Answer *answer, const Row *row) {
  if (answer->count == answer->room) {
    size_t room = answer->room ? 2 * answer->room : 128;
    Row *more = realloc(answer->rows, room * sizeof *more);
    answer->no_memory = more == NULL;
    if (answer->no_memory) return 0;
    answer->rows = more, answer->room = room;
  }
  answer->rows[answer->count++] = *row;
  return 1;
}

/* The events with a choice, of a body that SPARE zeros follow; false where it is not of the shape, or never ended. */
static int read_body(Answer *answer, const char *body, size_t length) {
  Totals *totals = &answer->totals;
  Reader reader = {.at = body, .end = body + length, .totals = totals};
  int said = 0;
  *totals = (Totals){.prompt = -1, .output = -1, .cached = -1, .reasoning = -1};
  answer->count = 0;
  answer->done = 0;
  while (!answer->done && reader.at < reader.end) {
    const char *at = reader.at;
    if (comment(&reader)) continue;
    reader.at = at;
    if ((answer->done = end_mark(&reader))) continue;
    reader.at = at;
    if (!event(&reader, body)) return 0;
    if (reader.role && !said && reader.row.said == 1) reader.row.total = -1; /* before the first token */
    said |= reader.row.said;
    if (reader.row.said && !add(answer, &reader.row)) return 0;
  }
  if (totals->reasoning > 0 && !totals->reasoned) return 0; /* what was never sent, `stream.py` leaves out */
  return said && reader.at == reader.end && (answer->done || totals->finish_reason.end > totals->finish_reason.begin);
}

/* ---- many answers */

/* Where in the data a record has the stamps of its pieces (behind them their sizes, and how long they had waited, if
   `waited`), how many there are, and where its body is. */
typedef struct {
  int64_t stamps, pieces, waited, body, length;
} Place;

/* What an answer says, as `answers.py` has it; places of texts are in the data. All zeros: it is left to `stream.py`. */
typedef struct {
  int64_t first_text_ns, characters, chunks, tokens; /* chunks that brought tokens */
  int64_t finish_reason, finish_reason_end, metrics, metrics_end;
  int32_t usual, by_usage, prompt, output, cached, done;
} Said;

typedef struct {
  int64_t arrival_ns, tokens;
} Chunk;

typedef struct {
  Chunk *chunks;
  size_t count, room;
} Chunks;

static int right(const Place *place, int64_t size) {
  return place->stamps >= 0 && place->stamps <= size && place->pieces >= 0 &&
         place->pieces <= (size - place->stamps) / (place->waited ? 16 : 12) && place->body >= 0 &&
         place->body <= size && place->length >= 0 && place->length <= size - place->body;
}

/* When each event was there: with the piece that has the first byte of its blank line. False where the pieces are not
   the body. */
static int stamp(Answer *answer, const char *data, const Place *place) {
  const char *stamps = data + place->stamps, *sizes = stamps + 8 * place->pieces, *waits = sizes + 4 * place->pieces;
  int64_t end = 0, arrival_ns;
  size_t row = 0;
  for (int64_t piece = 0; piece < place->pieces; piece++) {
    uint32_t size, wait = 0;
    memcpy(&size, sizes + 4 * piece, sizeof size);
    memcpy(&arrival_ns, stamps + 8 * piece, sizeof arrival_ns);
    if (place->waited) memcpy(&wait, waits + 4 * piece, sizeof wait);
    end += size;
    for (; row < answer->count && answer->rows[row].blank < end; row++)
      answer->rows[row].arrival_ns = (int64_t)((uint64_t)arrival_ns - wait);
  }
  return end == place->length;
}

/* Room for `more` chunks behind the others. */
static int reserve(Chunks *chunks, size_t more) {
  if (chunks->count + more <= chunks->room) return 1;
  size_t room = 2 * chunks->room + more;
  Chunk *grown = realloc(chunks->chunks, room * sizeof *grown);
  if (grown == NULL) return 0;
  chunks->chunks = grown, chunks->room = room;
  return 1;
}

/* As `_counts` of `stream.py`: whether usage is a running total of the text's tokens, and how many each chunk brought. */
static void count_tokens(Answer *answer, Said *said, Chunks *chunks) {
  size_t speaking = 0, grew = 0;
  int32_t most = 0, first_total = 0, last_new = 0;
  for (size_t k = 0; k < answer->count; k++) {
    Row *row = &answer->rows[k];
    int32_t total = row->total, new = total > most ? total - most : 0;
    most += new;
    row->total = new; /* from here on */
    if (row->said == 2) {
      if (!speaking++) first_total = total;
      grew += new > 0;
      last_new = new;
    }
    if (row->characters && !said->characters) said->first_text_ns = row->arrival_ns;
    said->characters += row->characters;
  }
  said->by_usage = most > 0 && (!speaking || (first_total > 0 && last_new > 0 && 2 * grew >= speaking));
  for (size_t k = 0; k < answer->count; k++) {
    const Row *row = &answer->rows[k];
    int64_t tokens = said->by_usage ? row->total : row->said == 2;
    if (!tokens) continue;
    chunks->chunks[chunks->count++] = (Chunk){row->arrival_ns, tokens};
    said->chunks++;
    said->tokens += tokens;
  }
}

/* Whether it claims more tokens than `stream.py` takes from any body of that length. */
static int claims_more(const Answer *answer, int64_t length) {
  for (size_t k = 0; k < answer->count; k++)
    if (answer->rows[k].total > MOST_SILENT + length) return 1;
  return 0;
}

/* What a record's answer says; `body` is a copy of its body, which SPARE zeros follow. */
static void read_answer(Answer *answer, const char *data, const Place *place, const char *body, Said *said,
                        Chunks *chunks) {
  if (place->length >= INT32_MAX || !read_body(answer, body, (size_t)place->length) || !stamp(answer, data, place) ||
      claims_more(answer, place->length))
    return;
  answer->no_memory = !reserve(chunks, answer->count);
  if (answer->no_memory) return;
  const Totals *totals = &answer->totals;
  count_tokens(answer, said, chunks);
  if (totals->finish_reason.begin) {
    said->finish_reason = place->body + (totals->finish_reason.begin - body);
    said->finish_reason_end = place->body + (totals->finish_reason.end - body);
  }
  if (totals->metrics.begin) {
    said->metrics = place->body + (totals->metrics.begin - body);
    said->metrics_end = place->body + (totals->metrics.end - body);
  }
  said->prompt = totals->prompt;
  said->output = totals->output;
  said->cached = totals->cached;
  said->done = answer->done;
  said->usual = 1;
}

/* Without Python's lock. False where memory ran out. */
static int read_all(const char *data, const Place *places, size_t count, char *body, Said *said, Chunks *chunks) {
  Answer answer = {0};
  for (size_t k = 0; k < count && !answer.no_memory; k++) {
    memcpy(body, data + places[k].body, (size_t)places[k].length);
    memset(body + places[k].length, 0, SPARE);
    read_answer(&answer, data, &places[k], body, &said[k], chunks);
  }
  free(answer.rows);
  return !answer.no_memory;
}

/* answers(data, places) is (said, chunks): bytes of `Said` of each `Place`, and of the `Chunk`s of one after the other. */
static PyObject *answers(PyObject *module, PyObject *args) {
  Py_buffer data, at;
  PyObject *found = NULL;
  (void)module;
  if (!PyArg_ParseTuple(args, "y*y*", &data, &at)) return NULL;
  const Place *places = at.buf;
  size_t count = (size_t)at.len / sizeof *places, longest = 0, good = 0;
  for (; good < count && right(&places[good], data.len); good++)
    if ((size_t)places[good].length > longest) longest = (size_t)places[good].length;
  Chunks chunks = {NULL, 0, 0};
  Said *said = calloc(count + 1, sizeof *said);
  char *body = malloc(longest + SPARE);
  if (good < count) {
    PyErr_SetString(PyExc_ValueError, "a record is not within the data");
  } else if (said == NULL || body == NULL) {
    PyErr_NoMemory();
  } else {
    int all;
    Py_BEGIN_ALLOW_THREADS
    all = reserve(&chunks, 1) && read_all(data.buf, places, count, body, said, &chunks);
    Py_END_ALLOW_THREADS
    if (all)
      found = Py_BuildValue("(y#y#)", (const char *)said, (Py_ssize_t)(count * sizeof *said),
                            (const char *)chunks.chunks, (Py_ssize_t)(chunks.count * sizeof *chunks.chunks));
    else
      PyErr_NoMemory();
  }
  free(said);
  free(body);
  free(chunks.chunks);
  PyBuffer_Release(&data);
  PyBuffer_Release(&at);
  return found;
}

static PyMethodDef methods[] = {
    {"answers", answers, METH_VARARGS, "What the answers at these places of the data say, where they are of the shape."},
    {NULL, NULL, 0, NULL}};

static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, "_events", NULL, -1, methods, NULL, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit__events(void) { return PyModule_Create(&module); }
