package token

import (
	"strings"
	"testing"

	"github.com/kernflux/opendsec/internal/fault"
)

func TestNewParsesAndChecks(t *testing.T) {
	seen := map[string]bool{}
	for range 2000 {
		full, id, hash := New()
		gotID, secret, err := Parse(full)
		if err != nil || gotID != id {
			t.Fatalf("%s: got id %s, %v; want %s", full, gotID, err, id)
		}
		if !IsID(id) {
			t.Fatalf("%q is no id", id)
		}
		if !Check(secret, hash) {
			t.Fatalf("%s does not match its own hash", full)
		}
		if seen[id] || seen[secret] {
			t.Fatalf("%s came twice", full)
		}
		seen[id], seen[secret] = true, true
	}
}

func TestCheckRefusesOthers(t *testing.T) {
	_, _, hash := New()
	other, _, _ := New()
	_, secret, err := Parse(other)
	if err != nil {
		t.Fatal(err)
	}
	for _, h := range [][]byte{hash, nil, {}, hash[:31]} {
		if Check(secret, h) {
			t.Errorf("a secret matched the hash %x of another", h)
		}
	}
}

// Every token that differs in one character is refused, without a look at any
// record.
func TestParseSeesTypos(t *testing.T) {
	full, _, _ := New()
	for i := range len(full) {
		for _, c := range []byte("aZ0_-\x00\xff") {
			if full[i] == c {
				continue
			}
			typo := full[:i] + string([]byte{c}) + full[i+1:]
			if _, _, err := Parse(typo); !fault.Is(err, fault.Unauthenticated) {
				t.Errorf("character %d replaced by %q: got %v", i, c, err)
			}
		}
	}
}

func TestParseSaysWhatIsWrong(t *testing.T) {
	full, _, _ := New()
	for in, want := range map[string]string{
		"":                      "no token",
		"ghp_0123":              "no token",
		full[1:]:                "no token",
		full[:len(full)-1]:      "not whole",
		full + "\n":             "not whole",
		"ods_":                  "not whole",
		full[:Len-1] + "-":      "characters",
		strings.ToUpper(full):   "no token",
		full[:Len-2] + "!!":     "characters",
		full[:Len-6] + "000000": "mistyped",
	} {
		_, _, err := Parse(in)
		if err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%q: got %v, want %q", in, err, want)
		}
		if err != nil && len(in) > 20 && strings.Contains(err.Error(), in[17:]) {
			t.Errorf("%q: the error tells the secret: %v", in, err)
		}
	}
}

func FuzzParse(f *testing.F) {
	full, _, _ := New()
	f.Add(full)
	f.Add("ods_")
	f.Add("ods_aaaaaaaaaaaa_" + strings.Repeat("0", 49))
	f.Fuzz(func(t *testing.T, in string) {
		id, secret, err := Parse(in)
		if err != nil {
			if !fault.Is(err, fault.Unauthenticated) || id != "" || secret != "" {
				t.Errorf("%q: got %q, %q, %v", in, id, secret, err)
			}
			return
		}
		if in != "ods_"+id+"_"+secret || !IsID(id) {
			t.Errorf("%q came apart as %q and %q", in, id, secret)
		}
	})
}
