package gatetest

import (
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"encoding/binary"
	"io"
	"log"
	"math/big"
	"net"
	"net/http"
	"net/netip"
	"strings"
	"time"

	"golang.org/x/net/dns/dnsmessage"
)

// Addresses of the world and of the node in it.
const (
	Node     = "198.51.100.1"
	Node6    = "2001:db8:51::1"
	Resolver = "198.51.100.53"
	Good     = "198.51.100.10" // example.com, and evil.test too: a shared address
	Good6    = "2001:db8:51::10"
	Bad      = "198.51.100.20" // evil.test
	Bad6     = "2001:db8:51::20"
	Network  = "203.0.113.7" // in the network that a rule names
	Networks = "203.0.113.0/24"
	Private  = "10.20.30.40" // in a network of the node's owner
)

// Banner is what servers say.
const Banner = "reached"

// records are what the resolver knows: addresses, or the name that a name is
// an alias of.
var records = map[string][]string{
	"example.com.":               {Good, Good6},
	"good.wild.example.":         {Good},
	"evil.test.":                 {Good, Bad},
	"denied.wild.example.":       {Bad},
	"alias.wild.example.":        {"denied.wild.example."},
	"chain.wild.example.":        {"alias.wild.example."},
	"loopback.wild.example.":     {"127.0.0.1"},
	"loopback6.wild.example.":    {"::1"},
	"private.wild.example.":      {Private},
	"node.wild.example.":         {Node},
	"node6.wild.example.":        {Node6},
	"metadata.wild.example.":     {"169.254.169.254"},
	"zero.wild.example.":         {"0.0.0.0"},
	"mapped.wild.example.":       {"::ffff:198.51.100.20"},
	"mapped-local.wild.example.": {"::ffff:127.0.0.1"},
	"nat64.wild.example.":        {"64:ff9b::a14:1e28"},
	"slot.wild.example.":         {"192.0.0.1"},
	"multicast.wild.example.":    {"224.0.0.251"},
	"linklocal.wild.example.":    {"fe80::1"},
	"ula.wild.example.":          {"fd12::1"},
	"cgnat.wild.example.":        {"100.64.0.1"},
}

// serve starts the world's servers and those of the node itself.
func (w *World) serve() {
	w.resolver()
	pair := w.certificate()
	for _, addr := range []string{Good, "[" + Good6 + "]", Bad, Private} {
		secure := tls.NewListener(logging{w.Listen(addr + ":443"), w}, &tls.Config{Certificates: []tls.Certificate{pair}})
		w.http(secure)
		w.http(logging{w.Listen(addr + ":80"), w})
	}
	for _, addr := range []string{Good + ":22", Bad + ":22", Network + ":6999", Network + ":7005", Network + ":7011", "203.0.114.1:7005", "169.254.169.254:80"} {
		go greet(w.Listen(addr), nil)
	}
	for _, addr := range []string{Node + ":2222", "127.0.0.1:2222", "[::1]:2222", "[" + Node6 + "]:2222"} {
		l, err := net.Listen("tcp", addr)
		if err != nil {
			w.t.Fatal(err)
		}
		w.t.Cleanup(func() { l.Close() })
		go greet(l, func(c net.Conn) { w.note(&w.hits, "the node's own %s was reached", c.LocalAddr()) })
	}
}

// greet says Banner to whoever connects.
func greet(l net.Listener, hit func(net.Conn)) {
	for {
		c, err := l.Accept()
		if err != nil {
			return
		}
		if hit != nil {
			hit(c)
		}
		go func() {
			io.WriteString(c, Banner)
			c.Close()
		}()
	}
}

func (w *World) http(l net.Listener) {
	srv := &http.Server{Handler: http.HandlerFunc(func(rw http.ResponseWriter, r *http.Request) {
		io.Copy(io.Discard, r.Body)
		io.WriteString(rw, Banner)
	}), ErrorLog: log.New(io.Discard, "", 0)}
	go srv.Serve(l)
	w.t.Cleanup(func() { srv.Close() })
}

// logging keeps what is sent to a listener's connections.
type logging struct {
	net.Listener
	w *World
}

func (l logging) Accept() (net.Conn, error) {
	c, err := l.Listener.Accept()
	if err != nil {
		return nil, err
	}
	return logged{c, l.w}, nil
}

type logged struct {
	net.Conn
	w *World
}

func (c logged) Read(b []byte) (int, error) {
	n, err := c.Conn.Read(b)
	if n > 0 {
		c.w.note(&c.w.bytes, "%s", b[:min(n, 4096)])
	}
	return n, err
}

// certificate returns one of nobody's making.
func (w *World) certificate() tls.Certificate {
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		w.t.Fatal(err)
	}
	of := &x509.Certificate{SerialNumber: big.NewInt(1), NotAfter: time.Now().Add(time.Hour), DNSNames: []string{"example.com", "*.wild.example"}}
	der, err := x509.CreateCertificate(rand.Reader, of, of, &key.PublicKey, key)
	if err != nil {
		w.t.Fatal(err)
	}
	return tls.Certificate{Certificate: [][]byte{der}, PrivateKey: key}
}

// resolver answers DNS queries by UDP and TCP.
func (w *World) resolver() {
	udp := w.Packets(Resolver + ":53")
	go func() {
		buf := make([]byte, 4096)
		for {
			n, from, err := udp.ReadFrom(buf)
			if err != nil {
				return
			}
			if a := w.answer(buf[:n]); a != nil {
				udp.WriteTo(a, from)
			}
		}
	}()
	l := w.Listen(Resolver + ":53")
	go func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			go func() {
				defer c.Close()
				var size [2]byte
				for {
					if _, err := io.ReadFull(c, size[:]); err != nil {
						return
					}
					q := make([]byte, binary.BigEndian.Uint16(size[:]))
					if _, err := io.ReadFull(c, q); err != nil {
						return
					}
					a := w.answer(q)
					c.Write(append(binary.BigEndian.AppendUint16(nil, uint16(len(a))), a...))
				}
			}()
		}
	}()
}

// answer answers a query, and remembers what was asked for.
func (w *World) answer(query []byte) []byte {
	var p dnsmessage.Parser
	head, err := p.Start(query)
	if err != nil {
		return nil
	}
	q, err := p.Question()
	if err != nil {
		return nil
	}
	name := strings.ToLower(q.Name.String())
	w.note(&w.queries, "%s", name)
	rcode := dnsmessage.RCodeSuccess
	if records[name] == nil {
		rcode = dnsmessage.RCodeNameError
	}
	b := dnsmessage.NewBuilder(nil, dnsmessage.Header{ID: head.ID, Response: true, RecursionAvailable: true, RCode: rcode})
	b.StartQuestions()
	b.Question(q)
	b.StartAnswers()
	follow(&b, q.Name, q.Type, 8)
	a, err := b.Finish()
	if err != nil {
		return nil
	}
	return a
}

// follow adds the records of a name, and of those that it is an alias of.
func follow(b *dnsmessage.Builder, name dnsmessage.Name, kind dnsmessage.Type, depth int) {
	h := dnsmessage.ResourceHeader{Name: name, Class: dnsmessage.ClassINET, TTL: 30}
	for _, r := range records[strings.ToLower(name.String())] {
		addr, err := netip.ParseAddr(r)
		switch {
		case err != nil && depth > 0:
			to := dnsmessage.MustNewName(r)
			b.CNAMEResource(h, dnsmessage.CNAMEResource{CNAME: to})
			follow(b, to, kind, depth-1)
		case kind == dnsmessage.TypeA && addr.Is4():
			b.AResource(h, dnsmessage.AResource{A: addr.As4()})
		case kind == dnsmessage.TypeAAAA && addr.Is6():
			b.AAAAResource(h, dnsmessage.AAAAResource{AAAA: addr.As16()})
		}
	}
}
