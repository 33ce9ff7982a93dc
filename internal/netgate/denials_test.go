package netgate

import (
	"encoding/json"
	"fmt"
	"net/netip"
	"testing"
	"time"

	compare "github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"
)

// What was denied is bounded, counts what is alike, and goes on from what was
// kept of it.
func TestDenials(t *testing.T) {
	log := NewDenials(Denied{})
	if _, changed := log.Changed(); changed {
		t.Error("nothing was denied, and it has changed")
	}
	at := time.Unix(5, 0).UTC()
	address := Denial{Time: at, Count: 1, Kind: DeniedAddress, Addr: netip.MustParseAddr("192.0.2.1"), Port: 443, Proto: "tcp", Why: "no rule"}
	name := Denial{Time: at, Count: 1, Kind: DeniedName, Name: "example.com", Rule: "*"}
	for range 3 {
		log.add(address)
		log.add(name)
	}
	d, changed := log.Changed()
	want := Denied{Newest: []Denial{address, name}, Total: 6}
	want.Newest[0].Count, want.Newest[1].Count = 3, 3
	if diff := compare.Diff(want, d, cmpopts.EquateComparable(netip.Addr{})); diff != "" || !changed {
		t.Errorf("changed %v (-want +got):\n%s", changed, diff)
	}
	if _, changed := log.Changed(); changed {
		t.Error("it has changed twice")
	}
	// Kept and read again.
	data, err := json.Marshal(d)
	must(t, err)
	var kept Denied
	must(t, json.Unmarshal(data, &kept))
	log = NewDenials(kept)
	if diff := compare.Diff(want, log.Denied(), cmpopts.EquateComparable(netip.Addr{})); diff != "" {
		t.Errorf("kept and read (-want +got):\n%s", diff)
	}
	for i := range 2 * maxDenials {
		log.add(Denial{Time: at, Count: 1, Kind: DeniedName, Name: fmt.Sprintf("n%d.example", i)})
	}
	d = log.Denied()
	if len(d.Newest) != maxDenials || d.Newest[maxDenials-1].Name != fmt.Sprintf("n%d.example", 2*maxDenials-1) || d.Total != 6+2*maxDenials {
		t.Errorf("%d denials, %d in all, the last %+v", len(d.Newest), d.Total, d.Newest[len(d.Newest)-1])
	}
	d.Newest = append(d.Newest, d.Newest...)
	if n := len(NewDenials(d).Denied().Newest); n != maxDenials {
		t.Errorf("%d denials are taken over", n)
	}
}

func BenchmarkKeepDenials(b *testing.B) {
	log := NewDenials(Denied{})
	for i := range maxDenials {
		log.add(Denial{Time: time.Unix(5, 0), Count: 1, Kind: DeniedName, Name: fmt.Sprintf("n%d.some.example.com", i), Why: "no rule allows the name on any port"})
	}
	for b.Loop() {
		data, err := json.Marshal(log.Denied())
		must(b, err)
		b.SetBytes(int64(len(data)))
	}
}
