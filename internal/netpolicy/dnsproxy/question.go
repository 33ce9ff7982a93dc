package dnsproxy

import (
	"encoding/binary"

	"github.com/miekg/dns"

	"github.com/kernflux/opendsec/internal/netpolicy"
)

// queryMost is how many bytes a query may have. Names, EDNS and its padding fit.
const queryMost = 2048

// query is what a sandbox asks.
type query struct {
	question
	msg  *dns.Msg // the query's header and question, as they came
	edns bool
	most int // bytes of the answer
}

// readQuery reads a query that came over TCP or not. What is wrong with it is
// said in rcode, and in why; both are zero if nothing is. A message that is no
// query at all is nil.
func readQuery(wire []byte, tcp bool) (q *query, rcode int, why string) {
	if len(wire) < 12 || wire[2]&0x80 != 0 {
		return nil, 0, ""
	}
	q = &query{msg: new(dns.Msg), most: dns.MinMsgSize}
	if tcp {
		q.most = dns.MaxMsgSize
	}
	if len(wire) > queryMost || q.msg.Unpack(wire) != nil {
		q.msg = &dns.Msg{MsgHdr: dns.MsgHdr{Id: binary.BigEndian.Uint16(wire), Opcode: int(wire[2]>>3) & 0xf}}
		return q, dns.RcodeFormatError, "the query is malformed"
	}
	if rcode, why = q.readEDNS(tcp); why != "" {
		return q, rcode, why
	}
	m := q.msg
	switch {
	case m.Opcode != dns.OpcodeQuery:
		return q, dns.RcodeNotImplemented, "only plain queries are answered"
	case len(m.Question) != 1 || len(m.Answer) > 0 || len(m.Ns) > 0:
		return q, dns.RcodeFormatError, "a query has one question and no answers"
	case m.Question[0].Qclass != dns.ClassINET:
		return q, dns.RcodeRefused, "only the class IN is answered"
	}
	name, ok := netpolicy.NormalName(m.Question[0].Name)
	if !ok {
		return q, dns.RcodeRefused, "the name is not a domain name"
	}
	q.question = question{name, m.Question[0].Qtype}
	return q, dns.RcodeSuccess, ""
}

// readEDNS reads the sandbox's EDNS record. Its options are for nobody.
func (q *query) readEDNS(tcp bool) (rcode int, why string) {
	for _, rr := range q.msg.Extra {
		opt, ok := rr.(*dns.OPT)
		if !ok {
			continue
		}
		if q.edns {
			return dns.RcodeFormatError, "a query has one EDNS record"
		}
		q.edns = true
		if opt.Version() != 0 {
			return dns.RcodeBadVers, "only version 0 of EDNS is known"
		}
		if !tcp {
			q.most = min(max(int(opt.UDPSize()), dns.MinMsgSize), payload)
		}
	}
	return dns.RcodeSuccess, ""
}

// kinds says what is done with a type of record.
type kind int

const (
	noSuch    kind = iota // answered that there is none, without asking
	forwarded             // asked for
	never                 // refused
)

// kindOf returns what is done with a type. Records that name addresses or keys
// beside A and AAAA (HTTPS, SVCB) would lead around the policy; programs do
// without them. What lists a whole zone, or everything at a name, is for no program.
func kindOf(typ uint16) kind {
	switch typ {
	case dns.TypeA, dns.TypeAAAA, dns.TypeCNAME, dns.TypeMX, dns.TypeTXT, dns.TypeSRV, dns.TypePTR:
		return forwarded
	case dns.TypeANY, dns.TypeAXFR, dns.TypeIXFR, dns.TypeMAILA, dns.TypeMAILB:
		return never
	}
	return noSuch
}

// typeName returns a type's name for a person.
func typeName(typ uint16) string { return dns.Type(typ).String() }

// reply makes an answer without records.
func (q *query) reply(rcode int) *dns.Msg {
	r := &dns.Msg{Compress: true}
	r.Id, r.Opcode, r.Response, r.Rcode = q.msg.Id, q.msg.Opcode, true, rcode
	r.RecursionDesired, r.RecursionAvailable, r.CheckingDisabled = q.msg.RecursionDesired, true, q.msg.CheckingDisabled
	if len(q.msg.Question) == 1 {
		r.Question = q.msg.Question
	}
	if q.edns {
		r.SetEdns0(payload, false)
	}
	return r
}
