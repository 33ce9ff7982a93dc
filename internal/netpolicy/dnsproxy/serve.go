package dnsproxy

import (
	"context"
	"errors"
	"fmt"
	"net"
	"runtime/debug"
	"time"

	"github.com/miekg/dns"

	"github.com/kernflux/opendsec/internal/netpolicy"
)

const (
	idle    = 10 * time.Second // of a TCP connection between queries
	judging = 4                // times an answer is judged anew because the policy changed
)

// serveUDP answers the queries that come by UDP.
func (h *Handle) serveUDP(ctx context.Context) {
	buf := make([]byte, queryMost+1)
	for {
		n, from, err := h.sb.UDP.ReadFrom(buf)
		if ctx.Err() != nil || errors.Is(err, net.ErrClosed) {
			return
		}
		if err != nil {
			h.log.Warn("cannot read DNS queries", "error", err)
			if !wait(ctx, 10*time.Millisecond) {
				return
			}
			continue
		}
		if !h.paced(ctx) {
			return
		}
		q := h.begin(buf[:n], false)
		if q == nil {
			continue
		}
		send := func() {
			if wire := h.finish(ctx, q); wire != nil {
				h.sb.UDP.WriteTo(wire, from) // who asked asks again
			}
		}
		if q.done {
			send()
			continue
		}
		if !enter(ctx, h.inFlight) {
			return
		}
		h.work.Go(func() {
			defer func() { <-h.inFlight }()
			send()
		})
	}
}

// serveTCP answers the queries that come by TCP.
func (h *Handle) serveTCP(ctx context.Context) {
	for {
		conn, err := h.sb.TCP.Accept()
		if ctx.Err() != nil || errors.Is(err, net.ErrClosed) {
			if err == nil {
				conn.Close()
			}
			return
		}
		if err != nil {
			h.log.Warn("cannot accept DNS connections", "error", err)
			if !wait(ctx, 10*time.Millisecond) {
				return
			}
			continue
		}
		if !h.keep(conn) {
			conn.Close()
			continue
		}
		h.work.Go(func() {
			defer h.drop(conn)
			h.serveConn(ctx, conn)
		})
	}
}

// keep notes a connection, unless there are too many or the handle is closed.
func (h *Handle) keep(conn net.Conn) bool {
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.closed || len(h.conns) >= h.p.cfg.Limits.Conns {
		return false
	}
	h.conns[conn] = true
	return true
}

func (h *Handle) drop(conn net.Conn) {
	conn.Close()
	h.mu.Lock()
	defer h.mu.Unlock()
	delete(h.conns, conn)
}

// serveConn answers the queries of a connection, one after the other.
func (h *Handle) serveConn(ctx context.Context, conn net.Conn) {
	for {
		if conn.SetDeadline(time.Now().Add(idle)) != nil {
			return
		}
		wire, err := readFrame(conn, queryMost)
		if err != nil || !h.paced(ctx) {
			return
		}
		q := h.begin(wire, true)
		if q == nil {
			return
		}
		answer := h.finishTCP(ctx, q)
		if answer == nil || conn.SetDeadline(time.Now().Add(idle)) != nil {
			return
		}
		if _, err := conn.Write(framed(answer)); err != nil {
			return
		}
	}
}

// finishTCP is finish under the limit of queries that are out.
func (h *Handle) finishTCP(ctx context.Context, q *pending) []byte {
	if !q.done {
		if !enter(ctx, h.inFlight) {
			return nil
		}
		defer func() { <-h.inFlight }()
	}
	return h.finish(ctx, q)
}

// paced waits until a further query may be taken. It reports false when the
// handle is closed.
func (h *Handle) paced(ctx context.Context) bool {
	d := h.pace.take(time.Now())
	if d == 0 {
		return true
	}
	h.record.delayed()
	return wait(ctx, d)
}

// wait waits, and reports false when ctx is done.
func wait(ctx context.Context, d time.Duration) bool {
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-ctx.Done():
		return false
	case <-t.C:
		return true
	}
}

// enter takes a place, and reports false when ctx is done before there is one.
func enter(ctx context.Context, places chan struct{}) bool {
	select {
	case <-ctx.Done():
		return false
	case places <- struct{}{}:
		return true
	}
}

// pending is a query and what becomes of it.
type pending struct {
	*query
	entry   Entry
	reply   *dns.Msg
	dropped int  // addresses
	done    bool // reply is what to say, and nobody need be asked
}

// end says what becomes of a query.
func (q *pending) end(v Verdict, rcode int, why string) {
	q.entry.Verdict, q.entry.Why = v, why
	q.reply, q.done = q.query.reply(rcode), true
}

// begin reads a query and ends it if that needs nobody else. It returns nil for
// a message that is not answered.
func (h *Handle) begin(wire []byte, tcp bool) (q *pending) {
	defer h.survive(func() { q = nil })
	now := time.Now()
	read, rcode, why := readQuery(wire, tcp)
	if read == nil {
		return nil
	}
	q = &pending{query: read, entry: Entry{Time: now}}
	if why != "" {
		q.end(Refused, rcode, why)
		return q
	}
	q.entry.Name, q.entry.Type = q.name, typeName(q.typ)
	if !h.resolve(q, h.policy.Load()) {
		return q
	}
	switch kindOf(q.typ) {
	case never:
		q.end(Refused, dns.RcodeRefused, "queries of this type are not answered")
		return q
	case noSuch:
		q.end(Allowed, dns.RcodeSuccess, "records of this type are left out")
		return q
	}
	if q.typ == dns.TypeAAAA && h.sb.IPv4Only {
		q.end(Allowed, dns.RcodeSuccess, "the sandbox has no IPv6")
		return q
	}
	if why := h.budget.spend(now, q.name, h.policy.Load().Free(q.name)); why != "" {
		q.end(Limited, dns.RcodeRefused, why)
		h.tell(q, Event{Kind: DeniedQuery, Why: why})
	}
	return q
}

// resolve reports whether a policy lets the name be asked for, and ends the
// query if not.
func (h *Handle) resolve(q *pending, p *netpolicy.Policy) bool {
	d := p.Resolve(q.name)
	q.entry.Rule, q.entry.Why = d.Rule, d.Why
	if !d.Allow {
		q.end(Denied, dns.RcodeNameError, d.Why)
		h.tell(q, Event{Kind: DeniedName, Rule: d.Rule, Why: d.Why})
	}
	return d.Allow
}

// tell tells of an event about a query.
func (h *Handle) tell(q *pending, e Event) {
	if h.sb.Event == nil {
		return
	}
	e.Sandbox, e.Time, e.Name, e.Type = h.sb.ID, q.entry.Time, q.name, typeName(q.typ)
	h.sb.Event(e)
}

// survive ends a query at which the code panicked, and only it: it reads what
// strangers write, and the process has other sandboxes to serve.
func (h *Handle) survive(then func()) {
	if r := recover(); r != nil {
		h.log.Error("answering a DNS query failed by a defect", "panic", r, "stack", string(debug.Stack()))
		then()
	}
}

// finish asks for what begin left open, and returns the answer to send, nil for
// none.
func (h *Handle) finish(ctx context.Context, q *pending) (wire []byte) {
	defer h.survive(func() { wire = nil })
	if !q.done {
		h.forward(ctx, q)
	}
	q.reply.Truncate(q.most)
	wire, err := q.reply.Pack()
	if err != nil {
		q.end(Failed, dns.RcodeServerFailure, fmt.Sprintf("the answer cannot be written: %v", err))
		wire, _ = q.reply.Pack()
	}
	q.entry.Took = time.Since(q.entry.Time)
	h.record.add(q.entry, q.dropped)
	return wire
}

// forward asks upstream and judges the answer.
func (h *Handle) forward(ctx context.Context, q *pending) {
	ctx, cancel := context.WithTimeout(ctx, h.p.cfg.Timeout)
	defer cancel()
	m, err := h.ask(ctx, q.question)
	if err != nil {
		q.end(Failed, dns.RcodeServerFailure, err.Error())
		return
	}
	for range judging {
		p := h.policy.Load()
		if !h.resolve(q, p) {
			return
		}
		j := h.p.cfg.judge(p, q.query, m)
		if j.open(q.query, m) {
			if m, err = h.chase(ctx, p, q, m, j.end); err != nil {
				q.end(Failed, dns.RcodeServerFailure, err.Error())
				return
			}
			j = h.p.cfg.judge(p, q.query, m)
		}
		h.conclude(q, j)
		err := h.pin(q, p, j)
		if errors.Is(err, ErrPolicyChanged) || err == nil && h.policy.Load() != p {
			continue
		}
		if err != nil {
			h.log.Error("cannot open the addresses of a name", "name", q.name, "error", err)
			q.end(Failed, dns.RcodeServerFailure, "its addresses cannot be opened: "+err.Error())
			return
		}
		h.report(q, j)
		return
	}
	q.end(Failed, dns.RcodeServerFailure, "the policy changes too often")
}

// ask asks upstream when there is a place.
func (h *Handle) ask(ctx context.Context, q question) (*dns.Msg, error) {
	if !enter(ctx, h.p.forward) {
		return nil, fmt.Errorf("too many DNS queries are out: %w", ctx.Err())
	}
	defer func() { <-h.p.forward }()
	m, err := h.p.upstreams.exchange(ctx, q)
	if err != nil {
		return nil, err
	}
	if m.Rcode != dns.RcodeSuccess && m.Rcode != dns.RcodeNameError {
		return nil, fmt.Errorf("the resolver says %s", dns.RcodeToString[m.Rcode])
	}
	return m, nil
}

// chase asks for the end of a chain that the upstream left open, until there is
// something or the chain is too long.
func (h *Handle) chase(ctx context.Context, p *netpolicy.Policy, q *pending, m *dns.Msg, end string) (*dns.Msg, error) {
	whole := &dns.Msg{MsgHdr: m.MsgHdr, Answer: m.Answer}
	for range chainMost {
		more, err := h.ask(ctx, question{end, q.typ})
		if err != nil {
			return nil, err
		}
		whole.Rcode, whole.Ns = more.Rcode, more.Ns
		whole.Answer = append(whole.Answer, more.Answer...)
		j := h.p.cfg.judge(p, q.query, whole)
		if j.end == end || !j.open(q.query, whole) {
			return whole, nil
		}
		end = j.end
	}
	return whole, nil
}

// conclude makes the answer of what may pass.
func (h *Handle) conclude(q *pending, j *judged) {
	q.entry.Addrs = nil
	switch {
	case j.denied != nil:
		q.end(Denied, dns.RcodeNameError, j.denied.Why)
		q.entry.Rule = j.denied.Rule
		return
	case j.broken != "":
		q.end(Failed, dns.RcodeServerFailure, j.broken)
		return
	}
	q.end(Allowed, j.rcode, q.entry.Why)
	if len(j.dropped) > 0 && len(j.records) == 0 {
		q.end(Denied, dns.RcodeSuccess, j.dropped[0].why.Why)
		q.entry.Rule = j.dropped[0].why.Rule
	}
	q.reply.Answer = j.records
	q.reply.Truncate(q.most)
	q.entry.Addrs = addrsIn(q.reply.Answer)
}

// pin opens the addresses of the answer.
func (h *Handle) pin(q *pending, p *netpolicy.Policy, j *judged) error {
	if len(q.entry.Addrs) == 0 {
		return nil
	}
	until := time.Now().Add(j.until + h.p.cfg.Grace)
	return h.sb.Pin(Pin{Name: q.name, Addrs: q.entry.Addrs, Until: until, Policy: p})
}

// report tells of what was taken out of an answer.
func (h *Handle) report(q *pending, j *judged) {
	q.dropped = len(j.dropped)
	if j.denied != nil {
		h.tell(q, Event{Kind: DeniedLink, Link: j.link, Rule: j.denied.Rule, Why: j.denied.Why})
	}
	for _, d := range j.dropped {
		h.tell(q, Event{Kind: DeniedAddress, Addr: d.addr, Rule: d.why.Rule, Why: d.why.Why})
	}
}
