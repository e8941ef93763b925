// The functions that Python calls. Each takes one struct (made in calls.py). One translation unit: templates are compiled once.
#include "backward.h"
#include "forward.h"
#include "objective.h"
#include "scoring.h"
#include "teacher.h"

extern "C" {
long csakit_lanes() { return csakit::LANES; }
long csakit_pairs() { return csakit::PAIRS; }  // whether bfloat16 is multiplied in pairs
void csakit_attend(const csakit::Attention* p) { csakit::attend(*p); }
void csakit_attend_backward(const csakit::Attention* p) { csakit::attend_backward(*p); }
void csakit_log_mass(const csakit::Attention* p) { csakit::log_mass(*p); }
void csakit_score(const csakit::Scoring* p) { csakit::score(*p); }
void csakit_score_backward(const csakit::Scoring* p) { csakit::score_backward(*p); }
void csakit_objective(const csakit::Objective* p) { csakit::objective(*p); }
}
