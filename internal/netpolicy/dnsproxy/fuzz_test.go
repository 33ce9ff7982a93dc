package dnsproxy

import (
	"slices"
	"testing"

	"github.com/miekg/dns"

	"github.com/kernflux/opendsec/internal/netpolicy"
)

// Whatever a sandbox sends, it gets a well-formed answer to it or none.
func FuzzQuery(f *testing.F) {
	for _, m := range []*dns.Msg{ask("example.com", dns.TypeA), ask("www.example.com", dns.TypeANY), ask("a.b.example.org", dns.TypeAAAA).SetEdns0(4096, true)} {
		f.Add(pack(f, m), false)
		f.Add(pack(f, m), true)
	}
	f.Add(append(make([]byte, 12), 0xc0, 12, 0, 1, 0, 1), false)
	h := &Handle{p: proxy(f, Config{}), log: quiet, budget: newBudget(Limits{FreeLength: 1 << 20, NameBits: 1 << 20, BitsBurst: 1e18}), record: newRecord(1)}
	h.policy.Store(policy(f, "example.com *.example.org"))
	f.Fuzz(func(t *testing.T, wire []byte, tcp bool) {
		read, _, _ := readQuery(wire, tcp) // without what saves the process from a panic
		q := h.begin(wire, tcp)
		if (read == nil) != (q == nil) {
			t.Fatal("a query is lost")
		}
		if q == nil {
			return
		}
		if !q.done { // what would be forwarded
			if !h.Policy().Resolve(q.name).Allow || kindOf(q.typ) != forwarded {
				t.Fatalf("%q of type %d is forwarded", q.name, q.typ)
			}
			q.end(Failed, dns.RcodeServerFailure, "")
		}
		out := h.finish(t.Context(), q)
		m := new(dns.Msg)
		if err := m.Unpack(out); err != nil || !m.Response || len(out) > q.most {
			t.Fatalf("the answer %x: %v, %v", out, m, err)
		}
		if m.Id != uint16(wire[0])<<8|uint16(wire[1]) {
			t.Fatalf("the answer's number is %d", m.Id)
		}
	})
}

// Whatever a resolver says, only records of the chain that was asked for pass,
// with addresses that the policy allows.
func FuzzAnswer(f *testing.F) {
	m := ask("example.com", dns.TypeA)
	for _, s := range []string{"example.com. 60 CNAME a.example.net.", "a.example.net. 60 A 192.0.2.1", "a.example.net. 60 A 10.0.0.1", "bad.example. 1 A 192.0.2.2",
		"example.com. 60 AAAA ::ffff:1.2.3.4", `example.com. 1 TXT "x"`, "a.example.net. 60 CNAME tracker.example."} {
		m.Answer = append(m.Answer, record1(f, s))
		f.Add(pack(f, m), uint16(dns.TypeA))
		f.Add(pack(f, m), uint16(dns.TypeAAAA))
	}
	f.Add(pack(f, m), uint16(dns.TypeTXT))
	f.Add(pack(f, m), uint16(dns.TypeCNAME))
	p := policy(f, "example.com !tracker.example !192.0.2.128/25 10.9.0.0/16")
	cfg := Config{}.filled()
	f.Fuzz(func(t *testing.T, wire []byte, typ uint16) {
		m := new(dns.Msg)
		if m.Unpack(wire) != nil || kindOf(typ) != forwarded {
			return
		}
		q := &query{question: question{"example.com", typ}, msg: ask("example.com", typ), most: dns.MaxMsgSize}
		j := cfg.judge(p, q, m)
		j.open(q, m)
		name := "example.com"
		for _, rr := range j.records {
			h := rr.Header()
			if got, _ := netpolicy.NormalName(h.Name); got != name {
				t.Fatalf("a record of %s passes: %v", h.Name, rr)
			}
			if h.Ttl < 10 || h.Ttl > 3600 || h.Class != dns.ClassINET || h.Rrtype != typ && h.Rrtype != dns.TypeCNAME {
				t.Fatalf("passes: %v", rr)
			}
			if alias, ok := rr.(*dns.CNAME); ok && typ != dns.TypeCNAME {
				name, _ = netpolicy.NormalName(alias.Target)
				if name == "tracker.example" && j.denied == nil {
					t.Fatalf("a denied link passes: %v", j.records)
				}
			}
		}
		for _, a := range j.addrs {
			if !p.Decide(netpolicy.Query{Name: "example.com", Addr: a}).Allow || a.Is4In6() {
				t.Fatalf("the address %s passes", a)
			}
		}
		if len(j.addrs) > addrsMost || len(j.records) > 0 && !slices.Equal(j.addrs, addrsIn(j.records)) {
			t.Fatalf("addresses %v, records %v", j.addrs, j.records)
		}
		r := q.reply(j.rcode & 0xf)
		r.Answer = j.records
		r.Truncate(q.most)
		if _, err := r.Pack(); err != nil {
			t.Logf("cannot be written: %v", err) // answered as a failure
		}
	})
}

// An answer of an upstream that is anything at all is an answer or an error.
func FuzzUpstream(f *testing.F) {
	u := &upstream{}
	q := u.query(question{"example.com", dns.TypeA}, false)
	r := new(dns.Msg)
	r.SetReply(q)
	f.Add(pack(f, r))
	f.Fuzz(func(t *testing.T, wire []byte) {
		m, err := new(upstream).check(q, wire)
		if err == nil && m == nil {
			t.Fatal("neither an answer nor an error")
		}
	})
}
