// place ORDER_ID [--fail]: an order and its message in one transaction. take: the messages of the consumer billing.
package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"
)

const worker = "go-%d"

// What --fail asks for: something that goes wrong after the message was written.
var errRefused = errors.New("refused")

type order struct {
	Order string `json:"order"`
}

func place(ctx context.Context, connection *pgx.Conn, orderID string, fail bool) error {
	body, err := json.Marshal(order{orderID})
	if err != nil {
		return err
	}
	// Commits when the function returns nil, and rolls back when it returns an error.
	return pgx.BeginFunc(ctx, connection, func(tx pgx.Tx) error {
		if err := enqueue(ctx, tx, string(body), orderID); err != nil {
			return err
		}
		if fail {
			return errRefused
		}
		return nil
	})
}

func enqueue(ctx context.Context, tx pgx.Tx, body, orderID string) error {
	_, err := tx.Exec(ctx,
		"insert into orders (id, status) values ($1, 'placed') on conflict (id) do update set status = 'placed'", orderID)
	if err != nil {
		return err
	}
	// snippet: begin
	// Go, pgx: tx is the pgx.Tx of your business rows, body is the JSON as a string
	sql := "select postroom.enqueue('orders', 'order.placed', $1::jsonb, key => $2)"
	if _, err := tx.Exec(ctx, sql, body, orderID); err != nil {
		return err // and roll back
	}
	// snippet: end
	return nil
}

type message struct {
	ID      string
	Claim   int64
	Type    string
	Payload []byte
}

// Returns how many messages could not be handled. They are tried again later, by whoever takes then.
func take(ctx context.Context, connection *pgx.Conn) (failed int, err error) {
	owner := fmt.Sprintf(worker, os.Getpid())
	for {
		rows, err := connection.Query(ctx,
			"select message_id, claim, type, payload from postroom.inbox_take('billing', 10, $1, '30 seconds')", owner)
		if err != nil {
			return failed, err
		}
		messages, err := pgx.CollectRows(rows, pgx.RowToStructByPos[message])
		if err != nil || len(messages) == 0 {
			return failed, err
		}
		for _, m := range messages {
			var o order
			err := json.Unmarshal(m.Payload, &o)
			if err == nil {
				err = pgx.BeginFunc(ctx, connection, func(tx pgx.Tx) error {
					if _, err := tx.Exec(ctx, "insert into bills (order_id) values ($1)", o.Order); err != nil {
						return err
					}
					_, err := tx.Exec(ctx, "select postroom.inbox_done('billing', $1, $2)", m.ID, m.Claim)
					return err
				})
			}
			if err == nil {
				fmt.Println("handled", m.ID, m.Type, o.Order)
				continue
			}
			failed++
			fmt.Fprintf(os.Stderr, "failed %s %s: %v\n", m.ID, m.Type, err)
			_, err = connection.Exec(ctx, "select postroom.inbox_fail('billing', $1, $2, $3)", m.ID, m.Claim, err.Error())
			if err != nil {
				return failed, err
			}
		}
	}
}

func run(arguments []string) error {
	placing := len(arguments) >= 2 && arguments[0] == "place" && !strings.HasPrefix(arguments[1], "-")
	fail := len(arguments) == 3 && arguments[2] == "--fail"
	taking := len(arguments) == 1 && arguments[0] == "take"
	if !taking && !(placing && (fail || len(arguments) == 2)) {
		return errors.New("usage: place ORDER_ID [--fail] | take")
	}
	ctx := context.Background()
	// An empty string: pgx reads PGHOST, PGPORT, PGDATABASE, PGUSER, PGPASSWORD, PGSSLMODE and PGSSLROOTCERT by itself.
	config, err := pgx.ParseConfig("")
	if err != nil {
		return err
	}
	config.ConnectTimeout = 10 * time.Second
	connection, err := pgx.ConnectConfig(ctx, config)
	if err != nil {
		return err
	}
	defer connection.Close(ctx)
	if taking {
		failed, err := take(ctx, connection)
		if err == nil && failed > 0 {
			err = fmt.Errorf("%d not handled", failed)
		}
		return err
	}
	err = place(ctx, connection, arguments[1], fail)
	switch {
	case errors.Is(err, errRefused):
		fmt.Println("rolled back", arguments[1])
		return nil
	case err != nil:
		return err
	}
	fmt.Println("placed", arguments[1])
	return nil
}

func main() {
	if err := run(os.Args[1:]); err != nil {
		fmt.Fprintln(os.Stderr, "error:", err)
		os.Exit(1)
	}
}
